"""Which correction keeps reward-based training alive when rollouts are generated in low precision?"""
