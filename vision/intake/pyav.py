"""Clips by PyAV, which comes with mmsdk[video]: frames of long clips without decoding what lies between them, and alpha."""

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from mmsdk.errors import InputError
from mmsdk.vision.intake.codec import unreadable
from mmsdk.vision.intake.limits import Limits
from mmsdk.vision.intake.reader import RATE, SAME
from mmsdk.vision.intake.source import Encoded, Stream

__all__ = ["PyAVReader"]

# FFmpeg's own decoders of these two leave alpha out.
WITH_ALPHA = {"vp8": "libvpx", "vp9": "libvpx-vp9"}


class _File:
    """What PyAV reads from. A failure ends it and is kept: FFmpeg may pass over one, and PyAV would then raise it for the next clip."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.failure: InputError | None = None

    def read(self, size: int = -1, /) -> bytes:
        """Bytes from where it stands; none after a failure."""
        try:
            return b"" if self.failure else self._stream.read(size)
        except InputError as error:
            self.failure = error
            return b""

    def seek(self, offset: int, whence: int = 0, /) -> int:
        """Go elsewhere; -1, which is no place, where that fails."""
        try:
            return self._stream.seek(offset, whence)
        except InputError as error:
            self.failure = error
            return -1

    def tell(self) -> int:
        """Where it stands; -1 where that is not known."""
        try:
            return self._stream.tell()
        except InputError as error:
            self.failure = error
            return -1


class PyAVReader:
    """A clip, read twice: once for the time of every frame, without decoding; once for the frames that are wanted.

    Of the second reading, only what lies between a wanted frame and the keyframe before it is decoded. Raises InputError for what
    cannot be opened or has no video in it, and for a codec without a decoder, by its name.
    """

    def __init__(self, source: Encoded, limits: Limits) -> None:
        self._source, self._limits, self._item = source, limits, source.item
        with self._opened() as (_, stream):
            self.size = stream.codec_context.height, stream.codec_context.width
            self._rate = float(stream.average_rate or stream.guessed_rate or RATE)
        self._timed = True
        self._key_places: list[int] = []
        self._key_starts: list[float] = []
        self._first = 0.0
        self.cut = False

    @classmethod
    @contextmanager
    def of(cls, source: Encoded, limits: Limits) -> Iterator["PyAVReader"]:
        """The reader of a source, for the time of a `with`."""
        yield cls(source, limits)

    def starts(self) -> npt.NDArray[np.float64]:
        """The second at which each frame is shown, rising from 0. `cut` then tells whether the file ends before its last frame."""
        times: list[float | None] = []
        with self._opened() as (container, stream):
            for place, packet in enumerate(container.demux(stream)):
                if packet.is_keyframe:
                    self._key_places.append(place)
                    self._key_starts.append(_seconds(packet) or 0.0)
                # the file breaks off in a corrupt one
                self.cut = self.cut or packet.is_corrupt
                # the last one, without content, only tells a decoder that nothing follows; an edited clip hides some
                if packet.size and not packet.is_corrupt and not packet.is_discard:
                    times.append(_seconds(packet))
                    self._limits.check_frames(len(times), self._item)
            self.cut = self.cut or 0 < len(times) < stream.frames
        starts = np.unique(np.asarray([time for time in times if time is not None], np.float64))
        self._timed = len(starts) == len(times) > 0
        if not self._timed:
            return np.arange(len(times)) / self._rate
        # the earliest start from each keyframe on: rising, so that the last keyframe before a time is found by bisection
        self._key_starts = np.minimum.accumulate(self._key_starts[::-1])[::-1].tolist()
        self._first = float(starts[0])
        return starts - self._first

    def frames(self, starts: Sequence[float]) -> Iterator[tuple[float, npt.NDArray[np.uint8]]]:
        """The frames (h w 3, or 4 with alpha) shown at these rising times; in place of one that does not decode, the next that does."""
        wanted = deque(starts)
        for time, frame in self._decoded(wanted):
            if frame.is_corrupt or time < wanted[0] - SAME:
                continue
            while wanted and wanted[0] <= time + SAME:
                wanted.popleft()
            self._limits.check_size(frame.height, frame.width, self._item)
            alpha = any(component.is_alpha for component in frame.format.components)
            pixels = frame.to_ndarray(format="rgba" if alpha else "rgb24")
            yield time, np.rot90(pixels, frame.rotation // 90)
            if not wanted:
                return

    def _decoded(self, wanted: deque[float]) -> Iterator[tuple[float, Any]]:
        """Frames in the order of time, leaving out stretches without one that is `wanted` (which shrinks while this runs)."""
        with self._opened() as (container, stream):
            context = self._decoder(stream)
            begin, count = self._key_before(wanted[0]), 0
            for place, packet in enumerate(container.demux(stream)):
                if place < begin or packet.is_corrupt:
                    continue
                for frame in _decode(context, packet):
                    count += 1
                    if not self._timed:
                        yield (count - 1) / self._rate, frame
                    elif frame.pts is not None:
                        yield float(frame.pts * stream.time_base) - self._first, frame
                if (ahead := self._key_before(wanted[0])) > max(place, begin):
                    begin = ahead
                    context.flush_buffers()

    def _key_before(self, time: float) -> int:
        """The place, among packets, of the last keyframe that is shown at or before this time."""
        before = bisect_right(self._key_starts, time + self._first + SAME) if self._timed else 0
        return self._key_places[before - 1] if before else 0

    @contextmanager
    def _opened(self) -> Iterator[tuple[Any, Any]]:
        """The container and its video stream, from the beginning."""
        # here and not above: without mmsdk[video] this module is imported and not used
        import av

        self._source.stream.seek(0)
        file = _File(self._source.stream)
        try:
            # the demuxer is named, so that no content can choose one that opens other files or addresses
            with av.open(file, mode="r", format=self._source.kind.demuxer, metadata_errors="replace") as container:
                yield container, self._video(container)
        except InputError as error:
            raise file.failure or error from None
        except av.FFmpegError as error:
            told = f"the clip ({self._source.kind.name}) is truncated or corrupt: {error.strerror}"
            raise file.failure or InputError(told, item=self._item) from error
        if file.failure:
            raise file.failure

    def _video(self, container: Any) -> Any:
        """The stream of moving pictures; a cover, as music has one, is none."""
        from av.stream import Disposition

        for stream in container.streams.video:
            if not stream.disposition & Disposition.attached_pic:
                if stream.codec_context is None:
                    raise InputError(unreadable(self._source.kind.name, self._source.stream), item=self._item)
                return stream
        raise InputError(f"there are no moving pictures in it ({self._source.kind.name})", item=self._item)

    def _decoder(self, stream: Any) -> Any:
        import av

        context = stream.codec_context
        told = {name.lower(): value for name, value in stream.metadata.items()}
        if told.get("alpha_mode") == "1" and context.codec.canonical_name in WITH_ALPHA:
            context = av.CodecContext.create(WITH_ALPHA[context.codec.canonical_name], "r")
        # a clip may grow in the middle; FFmpeg then refuses before it sets memory aside
        context.options = {"max_pixels": str(self._limits.pixels)}
        context.thread_type = "AUTO"
        return context


def _seconds(packet: Any) -> float | None:
    return None if packet.pts is None else float(packet.pts * packet.time_base)


def _decode(context: Any, packet: Any) -> list[Any]:
    """The frames that this packet completes; none where it is damaged."""
    import av

    try:
        frames: list[Any] = context.decode(packet)
    except av.FFmpegError:
        return []
    return frames
