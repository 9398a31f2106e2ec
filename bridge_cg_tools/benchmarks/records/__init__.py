"""Records of what was measured: their fields, their files, their origin."""
