"""`accelerate launch -m draftsmith.train RECIPE [key=value …]`"""

import signal
import sys

from draftsmith.errors import DraftsmithError
from draftsmith.terminal import printable, quiet_imports
from draftsmith.train.process import launch_variables
from draftsmith.train.recipe import load_recipe


def main(arguments: list[str]) -> int:
    """Return the exit code: 0, 2 and one line for errors that the user can fix, 130 after Ctrl-C, 143 after SIGTERM."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: accelerate launch -m draftsmith.train RECIPE [section.key=value ...]")
        return 0 if arguments else 2
    quiet_imports()
    try:
        recipe = load_recipe(arguments[0], arguments[1:])
        recipe.require_paths()
        if launch_variables().rank == 0:
            print(f"{recipe.name}: loading torch", file=sys.stderr, flush=True)
        from draftsmith.train.trainer import train

        train(recipe)
    except DraftsmithError as error:
        print(printable(f"{type(error).__name__}: {error}"), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
