"""The page: a head, and one tab for each thing that mmsdk does."""

import html

import gradio as gr

from mmsdk import __version__
from mmsdk.apps.web import bench, image, making, robot, video
from mmsdk.apps.web.filming import Films
from mmsdk.apps.web.models import Models
from mmsdk.vision.intake import Limits

__all__ = ["build"]

KEPT_SECONDS = 3600  # uploads are deleted after so long


def build(models: Models, limits: Limits, films: Films | None = None) -> gr.Blocks:
    """The page over these models; `limits` are those of an upload once decoded. The tab of made clips is there where `films` are."""
    with gr.Blocks(title="mmsdk", analytics_enabled=False, delete_cache=(600, KEPT_SECONDS), fill_width=True) as page:
        gr.HTML(_head(models))
        with gr.Tabs(elem_classes="mm-tabs"):
            with gr.Tab("Image", id="image"):
                image.tab(page, models, limits)
            with gr.Tab("Video", id="video"):
                video.tab(models, limits)
            if films is not None:
                with gr.Tab("Video generation", id="film"):
                    making.tab(films)
            with gr.Tab("Robot", id="robot"):
                robot.tab()
            with gr.Tab("Bench", id="bench"):
                bench.tab()
    page.queue(default_concurrency_limit=8, max_size=64)
    return page


def _head(models: Models) -> str:
    name, precision = html.escape(models.name), html.escape(models.precision)
    return (
        '<div class="mm-top"><div><h1>mmsdk</h1><p>Pictures and clips in, words and robot actions out, by fewer tokens.</p></div>'
        f'<p class="mm-model"><b>{name}</b> · {precision}<br><span>version {__version__}</span></p></div>'
    )
