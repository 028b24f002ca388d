"""Every file that this package writes goes through here: a `Saving`, or `atomic_file` for a single one."""

from .files import make_folder as make_folder
from .files import room_for as room_for
from .files import to_disk as to_disk
from .files import unmake_folders as unmake_folders
from .saving import Saving as Saving
from .saving import Target as Target
from .saving import abandon_saves as abandon_saves
from .saving import atomic_file as atomic_file
from .saving import filling as filling
from .saving import reading as reading
from .saving import write_file as write_file
from .seal import is_sealed as is_sealed
from .seal import read_if_plain as read_if_plain
from .seal import unsealed as unsealed
