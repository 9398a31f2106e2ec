"""Vision encoders as regions: layout from grids on the device, programs, parts of layers."""
