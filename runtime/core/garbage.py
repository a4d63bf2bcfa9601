"""When Python looks for garbage: it goes through all objects, also those that stay as long as the process."""

import gc


def collect_seldom() -> None:
    """Lets Python look for garbage at every 50,000 new objects: imported modules and traced programs are a million
    that stay, and looking through them at every 700 takes a tenth to a quarter of the time."""
    gc.set_threshold(50_000, 20, 100)


def collect_often() -> None:
    """Lets Python look for garbage as often as it does by itself: cycles of a user's code may hold arrays for days."""
    gc.set_threshold(700, 10, 10)
