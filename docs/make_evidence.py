"""Record evidence for every target on this machine, and store it in the package.

    python docs/make_evidence.py

The embedded model is exported and verified for every target, and compiled if the vendor's compiler is
installed. This takes minutes. Run it when a target, a program or a runtime's version has changed. Then run
`make docs`, which computes statuses from this evidence.
"""

from pathlib import Path
from tempfile import TemporaryDirectory

from whisperport.apps.cli.console import stages
from whisperport.build.compile.compile import CompileOptions
from whisperport.build.compile.compile import compile as compile_bundle
from whisperport.build.export.export import export
from whisperport.build.export.export_options import ExportOptions
from whisperport.model.checkpoint import load_checkpoint
from whisperport.program.bundle import Bundle
from whisperport.program.evidence import Evidence
from whisperport.targets import TARGETS, Target
from whisperport.verification.project_evidence import by_target, evidence_file, to_bytes


def main() -> None:
    """Export for every target; write the files only if all exports have succeeded."""
    checkpoint = load_checkpoint("default")
    found: dict[Path, dict[str, tuple[Evidence, ...]]] = {}
    with stages():
        for target in TARGETS:
            name = target.spec.name
            if target.unsupported("encoder", target.spec.runs.precisions[0]):
                continue
            with TemporaryDirectory() as folder:
                options = ExportOptions(
                    uncached_decoder=target.uncached_form(checkpoint.dims) is not None
                )
                bundle = export(checkpoint, name, Path(folder) / name, options)
                if _has_compiler_here(target):
                    # The few shipped recordings are enough to show that it compiles.
                    bundle = compile_bundle(bundle.folder, CompileOptions(force=True)).bundle
                of_file = found.setdefault(evidence_file(target), {})
                of_file[name] = by_target(Bundle.open(bundle.folder).manifest)[name]
    for file, evidence in found.items():
        file.write_bytes(to_bytes(evidence))


def _has_compiler_here(target: Target) -> bool:
    return target.compiler is not None and target.compiler.installed({}) is not None


if __name__ == "__main__":
    main()
