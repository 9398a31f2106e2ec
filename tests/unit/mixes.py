"""Mixes of images and video for the small tower, as rows of `grid_thw`."""

ONE_UNIT = [[1, 2, 2]]
IMAGES = [[1, 4, 6], [1, 8, 4], [1, 2, 2]]
VIDEO = [[4, 4, 4]]
MIXED = [[1, 6, 4], [3, 4, 2], [1, 2, 8]]
TINY = [[1, 2, 2]] * 9
EXACT = [[1, 8, 8]]
ONE_OVER = [[1, 8, 8], [1, 2, 2]]
MOST_FRAMES = [[16, 2, 2]]
WHOLE_LARGEST = [[1, 16, 16]]
FITTING = [ONE_UNIT, IMAGES, VIDEO, MIXED, TINY, EXACT, ONE_OVER, MOST_FRAMES, WHOLE_LARGEST]
TOO_MANY_FRAMES = [[17, 2, 2]]
TOO_MANY_TOKENS = [[1, 16, 16], [1, 2, 2]]
