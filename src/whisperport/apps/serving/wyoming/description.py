"""What a server tells about itself in the `info` event."""

from importlib.metadata import version

from wyoming.info import AsrModel, AsrProgram, Attribution, Info

from whisperport.apps.serving.service import Service

PROGRAM = "whisperport"
URL = "https://github.com/openai/whisper"


def info_of(service: Service) -> Info:
    """Return the program, its model and the languages of the model."""
    name, options = service.model_ids[0], service.options
    model = AsrModel(
        name=name,
        attribution=Attribution("OpenAI and the model's authors", URL),
        installed=True,
        description=f"{service.about['bundle']} on {service.about['backend']}",
        version=service.about["sha256"][:12],
        languages=list(service.transcriber.engine.generation.languages) or ["en"],
    )
    program = AsrProgram(
        name=PROGRAM,
        attribution=Attribution("whisperport", URL),
        installed=True,
        description="Whisper on this machine",
        version=version("whisperport"),
        models=[model],
        requires_external_vad=not options.wyoming_vad,
        # Whisper was trained on speech of all levels with noise.
        prefers_auto_gain_enabled=False,
        prefers_noise_reduction_enabled=False,
    )
    return Info(asr=[program])
