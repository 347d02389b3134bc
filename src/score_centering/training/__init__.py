"""The run loop: rollouts, rewards, updates, and one recorded row a step."""
