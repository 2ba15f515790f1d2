"""The suffixes by which audio and video files are found in a folder."""

# FFmpeg reads more formats; a file of any other suffix is transcribed if it is named.
AUDIO_SUFFIXES = frozenset(
    (
        *(".3gp", ".aac", ".ac3", ".aif", ".aiff", ".amr", ".au", ".avi", ".caf", ".flac", ".flv"),
        *(".m4a", ".m4b", ".m4v", ".mka", ".mkv", ".mov", ".mp2", ".mp3", ".mp4", ".mpeg", ".mpg"),
        *(".oga", ".ogg", ".opus", ".ts", ".w64", ".wav", ".webm", ".wma", ".wmv"),
    )
)
