"""A device that runs transfers in every legal order and checks every access against the waits that were asked for."""
