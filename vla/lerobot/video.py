"""The mp4 files of a dataset: frames one after the other at its rate, and the frames of one episode back."""

from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import numpy.typing as npt

from mmsdk.errors import InputError

__all__ = ["FrameWriter", "frames_between"]

Frame = npt.NDArray[np.uint8]

# as lerobot encodes: every second frame stands alone, so that any can be got at
_GROUP, _QUALITY = 2, "23"
_NEAR = 1e-3


class FrameWriter:
    """Writes RGB frames h w 3 into an mp4, h264 in yuv420p, whose sides are even."""

    def __init__(self, path: Path, fps: int, height: int, width: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.fps, self.count, self.size = fps, 0, 0
        self._container = av.open(str(path), "w", format="mp4")
        self._stream = self._container.add_stream("h264", rate=fps, options={"crf": _QUALITY, "tune": "zerolatency"})
        self._stream.height, self._stream.width, self._stream.pix_fmt, self._stream.gop_size = height, width, "yuv420p", _GROUP
        self._stream.time_base = Fraction(1, fps)

    @property
    def seconds(self) -> float:
        """How long it is by now."""
        return self.count / self.fps

    def add(self, frame: Frame) -> None:
        """Add a frame."""
        picture = av.VideoFrame.from_ndarray(frame, format="rgb24")
        picture.pts, picture.time_base = self.count, Fraction(1, self.fps)
        packets = self._stream.encode(picture)
        self._container.mux(packets)
        self.count, self.size = self.count + 1, self.size + sum(packet.size for packet in packets)

    def close(self) -> None:
        """Finish the file."""
        self._container.mux(self._stream.encode())
        self._container.close()


def frames_between(path: Path, begin: float, count: int, fps: int) -> Iterator[Frame]:
    """`count` frames from the second `begin` on, RGB h w 3. Raises InputError for a file that cannot be read or lacks one."""
    found = 0
    try:
        with av.open(str(path), format="mp4") as container:
            stream = container.streams.video[0]
            if begin > 0:
                container.seek(round((begin - 0.5 / fps) / stream.time_base), stream=stream)
            for frame in container.decode(stream):
                wanted = begin + found / fps
                if frame.time < wanted - 0.5 / fps:
                    continue
                if abs(frame.time - wanted) > _NEAR:
                    break
                yield frame.to_ndarray(format="rgb24")
                found += 1
                if found == count:
                    return
    except (av.FFmpegError, IndexError) as error:
        raise InputError(f"cannot be read: {error}", item=str(path)) from None
    raise InputError(f"has no frame at {begin + found / fps:.3f} s, expected {count} from {begin:.3f} s on", item=str(path))
