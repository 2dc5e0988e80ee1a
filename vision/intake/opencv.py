"""Clips by OpenCV's FFmpeg, which every installation has."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import cv2
import numpy as np
import numpy.typing as npt

__all__ = ["OpenCVReader"]

# Frames that are cheaper to step over than to seek across: a seek goes back to the last keyframe.
STEP = 96


class OpenCVReader:
    """A clip in a file. `count` is 0 where the header does not tell; `opens` says whether there is a decoder for it."""

    name = "OpenCV"

    def __init__(self, path: Path) -> None:
        # the backend is named, or a path with a percent sign would be taken for a numbered series of pictures
        self._capture = cv2.VideoCapture(str(path.absolute()), cv2.CAP_FFMPEG)
        self._path = path
        self.opens = bool(self._capture.isOpened())
        self.count = max(0, int(self._capture.get(cv2.CAP_PROP_FRAME_COUNT)))
        self.rate = float(self._capture.get(cv2.CAP_PROP_FPS))
        self.size = int(self._capture.get(cv2.CAP_PROP_FRAME_HEIGHT)), int(self._capture.get(cv2.CAP_PROP_FRAME_WIDTH))
        self._at = 0
        self._time = -1.0

    def frames(self, wanted: Sequence[int]) -> Iterator[tuple[npt.NDArray[np.uint8], float]]:
        """The frames (h w 3) of these rising indices and their times in seconds, up to the end or the first damage."""
        for index in wanted:
            if index - self._at > STEP:
                self._capture.set(cv2.CAP_PROP_POS_FRAMES, index)
                self._at = index
            while self._at < index and self._step():
                pass
            if self._at < index or not self._step():
                return
            good, pixels = self._capture.retrieve()
            if not good:
                return
            yield np.asarray(pixels[..., ::-1], np.uint8), self._time

    def walk(self, most: int) -> int:
        """How many frames decode, counted up to `most` + 1 without keeping any; the clip begins anew afterwards."""
        self.rewind()
        while self._at <= most and self._step():
            pass
        found = self._at
        self.rewind()
        return found

    def rewind(self) -> None:
        """Back to before the first frame, also for streams that cannot seek."""
        self._capture.release()
        self._capture.open(str(self._path.absolute()), cv2.CAP_FFMPEG)
        self._at, self._time = 0, -1.0

    def close(self) -> None:
        """Let go of the file."""
        self._capture.release()

    def _step(self) -> bool:
        if not self._capture.grab():
            return False
        time = float(self._capture.get(cv2.CAP_PROP_POS_MSEC)) / 1000
        # without stamps every time is 0, and the rate has to tell
        if time <= self._time and self.rate > 0:
            time = max(self._at / self.rate, self._time)
        self._at += 1
        self._time = time
        return True
