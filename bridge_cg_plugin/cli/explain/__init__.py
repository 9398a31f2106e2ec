"""`bridge-cg explain`: what an input resolves to, without a network, a GPU or the time that Bridge takes to import."""
