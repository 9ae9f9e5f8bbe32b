"""What a command needs of Python and the operating system; it knows no recipe."""
# pyright: reportUnusedImport=false

from harness.system.files import make_folder, open_regular, read_whole, sync, write_whole
from harness.system.folder_lock import FolderLock, is_held, refuse_held
from harness.system.garbage import collected_by_hand, end_process, older_objects_kept
from harness.system.hub import hub_left_alone, hub_or_cache, hub_unreached
from harness.system.interruption import (
    CTRL_C_STATUS,
    held_back,
    interrupted_status,
    interruptible,
    is_writing,
    signals_answered,
)
from harness.system.locations import PACKAGE, profiles_folder, recipes_folder
from harness.system.notebook import Rows, notebook_html
from harness.system.replacement import Replacement, all_replaced, in_environment, nothing, replaced
from harness.system.streams import (
    complain,
    quiet_libraries,
    say_once,
    stdout_kept_for_json,
    warn_of_trusted_code,
)
from harness.system.strict_json import TooManyValues, is_array, is_object, parse_json, unrepeated
from harness.system.strict_yaml import parse_yaml, read_mapping, to_yaml
from harness.system.torch_release import (
    CUBLAS_WORKSPACE_BYTES,
    HOPPERS_CUBLAS_WORKSPACE_BYTES,
    FreeBlockOrder,
    TorchRelease,
)
from harness.system.versions import PACKAGES, SETTINGS, installed_version, installed_versions, provenance
