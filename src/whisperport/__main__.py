"""The command `whisperport`, and `python -m whisperport`: ready for Ctrl-C before all else is imported."""

from whisperport import interrupts


def main() -> None:
    """Run the command line; see `whisperport.cli.main.main` for the exit statuses."""
    try:
        interrupts.install()
        from whisperport.cli.main import main as run

        run()
    except KeyboardInterrupt:  # while modules were imported, or a second one
        interrupts.leave()
    finally:
        interrupts.restore()


if __name__ == "__main__":
    main()
