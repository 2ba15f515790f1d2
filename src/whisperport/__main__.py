"""The command `whisperport`, also `python -m whisperport`. Ctrl-C is handled before other imports."""

from whisperport import interrupts


def main() -> None:
    """Run the command line. `whisperport.cli.main.main` lists the exit statuses."""
    try:
        interrupts.install()
        from whisperport.cli.main import main as run

        run()
    except KeyboardInterrupt:  # during the imports above, or a second Ctrl-C
        interrupts.leave()
    finally:
        interrupts.restore()


if __name__ == "__main__":
    main()
