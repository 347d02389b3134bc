"""What runs in verl's actor workers, one a rank: shards of model and optimiser, loss, way to the server."""
