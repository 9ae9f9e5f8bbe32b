from typing import Any

LOGGER_TYPE_TO_CLASS: dict[str, Any]
