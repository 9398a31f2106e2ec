"""Packed (thd) sequences in language-model graphs: layout on the device, programs, the decoder's graphs."""
