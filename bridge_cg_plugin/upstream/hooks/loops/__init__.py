"""Training steps: Bridge's loop, other loops, what is read and checked at a step's end."""
