"""The main job: Qwen3-VL trained on photographs, eager and with vision graphs, compared step by step."""
