"""What a program is: sizes, windows, masks, signatures, placement, runners and evidence."""
