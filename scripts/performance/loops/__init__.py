"""Training loops other than Bridge's own, eager and on graphs: rounds of reinforcement learning on one GPU."""
