"""Use a server through Home Assistant's own integration of the Wyoming protocol.

python home_assistant.py FOLDER HOST PORT LANGUAGE AUDIO [TEXT]: prints "ok", or fails. Without TEXT, which
AUDIO must give, it prints what it gets. FOLDER is an unpacked `homeassistant` wheel. The code of its
integrations `wyoming` and `stt` runs; the rest of Home Assistant is replaced.
"""

import asyncio
import importlib
import importlib.util
import sys
import wave
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from unittest.mock import MagicMock

folder, host, port, language, audio, *texts = sys.argv[1:]
OWN = ("wyoming.stt", "wyoming.data", "wyoming.error", "wyoming.const", "wyoming.models")
OWN += ("stt", "stt.const", "stt.models")
PIECE = 1024  # samples at a time


class Replaced(MetaPathFinder, Loader):
    """Finds the modules of Home Assistant: those of `OWN` are read, all others are empty."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] != "homeassistant":
            return None
        short = name.removeprefix("homeassistant.components.")
        if short in OWN:
            found = Path(folder, *name.split("."))
            file = found / "__init__.py" if found.is_dir() else found.with_suffix(".py")
            inside = [str(found)] if found.is_dir() else None
            return importlib.util.spec_from_file_location(
                name, file, submodule_search_locations=inside
            )
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return Empty(spec.name)

    def exec_module(self, module):
        pass


class Empty(ModuleType):
    """A module in which every name is defined."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if self.__name__ == "homeassistant.components" and name in OWN:
            return importlib.import_module(f"{self.__name__}.{name}")
        if name in ("HomeAssistantError", "RestoreEntity", "HomeAssistantView"):
            base = Exception if name.endswith("Error") else object
            return type(name, (base,), {"async_write_ha_state": lambda self: None})
        if name == "callback":
            return lambda function: function
        return MagicMock()


sys.meta_path.insert(0, Replaced())

from homeassistant.components import stt  # noqa: E402
from homeassistant.components.wyoming.data import WyomingService  # noqa: E402
from homeassistant.components.wyoming.stt import WyomingSttProvider  # noqa: E402


async def pieces():
    with wave.open(audio) as file:
        while data := file.readframes(PIECE):
            yield data


async def main():
    service = await WyomingService.create(host, int(port))
    assert service is not None
    assert service.has_services()
    entry = MagicMock(entry_id="1")
    provider = WyomingSttProvider(entry, service)
    asked = stt.SpeechMetadata(
        language,
        stt.AudioFormats.WAV,
        stt.AudioCodecs.PCM,
        stt.AudioBitRates.BITRATE_16,
        stt.AudioSampleRates.SAMPLERATE_16000,
        stt.AudioChannels.CHANNEL_MONO,
    )
    assert provider.check_metadata(asked), provider.supported_languages
    process = provider.internal_async_process_audio_stream
    found = [await process(asked, pieces())]
    found += await asyncio.gather(*(process(asked, pieces()) for _ in range(4)))
    for one in found:
        assert one.result is stt.SpeechResultState.SUCCESS, one
        assert not texts or one.text == texts[0], one
    languages = len(provider.supported_languages)
    print("ok" if texts else f"{languages} languages: {[one.text for one in found]}")


asyncio.run(main())
