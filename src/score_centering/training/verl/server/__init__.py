"""What runs in verl's rollout servers, and in the processes of vLLM below them."""
