"""A device that runs copies in any legal order and checks that every access is ordered by a wait."""
