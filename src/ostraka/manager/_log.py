"""Where the manager's messages go."""

import logging

log = logging.getLogger("ostraka")
