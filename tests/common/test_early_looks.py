"""So many looks are made, and no more unless something was found."""

from amp_patch.common.early_looks import WATCHED, EarlyLooks


def counted(looks: EarlyLooks) -> int:
    """Make the looks that are left, 100 at most, and return how many these were."""
    made = 0
    while looks.left and made < 100:
        looks.count()
        made += 1
    return made


def test_there_are_so_many_looks_and_no_more() -> None:
    assert (counted(EarlyLooks()), counted(EarlyLooks(3))) == (WATCHED, 3)
    looks = EarlyLooks(0)
    looks.count()
    assert looks.left == 0


def test_one_more_look_is_made_where_none_is_left() -> None:
    looks = EarlyLooks(3)
    looks.look_once()
    assert (counted(looks), looks.are_endless) == (3, False)
    looks.look_once()
    assert counted(looks) == 1


def test_where_something_was_found_there_is_no_last_look() -> None:
    looks = EarlyLooks(3)
    counted(looks)
    looks.go_on()
    looks.look_once()
    assert (counted(looks), looks.are_endless) == (100, True)
