"""How the page looks: paper and ink, one accent, a serif for what is said and a monospace for what is measured.

Nothing is fetched from anywhere: the sans and the monospace come with Gradio (of their weights only some have Latin letters), the serif,
Lora, stands in `fonts/` under its own licence, the SIL Open Font License. What the theme's variables cannot say stands in style.css.
"""

import base64
from pathlib import Path

import gradio as gr

__all__ = ["style", "theme"]

HERE = Path(__file__).parent
SERIF = {400: "Lora-Regular.woff2", 600: "Lora-SemiBold.woff2"}
INK = gr.themes.Color(
    "#f7f5f0", "#efece4", "#e2ddd1", "#cbc4b4", "#a39b8a", "#7b7466", "#5e584d", "#454139", "#2f2c27", "#211f1b", "#171613", name="ink"
)
PINE = gr.themes.Color(
    "#eef6f3", "#d7eae3", "#b0d5c8", "#82baa9", "#559c89", "#37806d", "#286856", "#205345", "#1b4338", "#163730", "#0b1f1b", name="pine"
)


def theme() -> gr.themes.Base:
    """The theme, for light and dark."""
    base = gr.themes.Base(
        primary_hue=PINE,
        secondary_hue=PINE,
        neutral_hue=INK,
        radius_size=gr.themes.sizes.radius_md,
        spacing_size=gr.themes.sizes.spacing_md,
        text_size=gr.themes.sizes.text_md,
        font=(gr.themes.LocalFont("IBM Plex Sans", (400,)), "system-ui", "sans-serif"),
        font_mono=(gr.themes.LocalFont("IBM Plex Mono", (400,)), "ui-monospace", "monospace"),
    )
    dark = {"body_background_fill_dark": "#171613", "background_fill_primary_dark": "#1e1d19", "background_fill_secondary_dark": "#1e1d19"}
    return base.set(
        body_background_fill="*neutral_50",
        body_text_color="*neutral_900",
        background_fill_primary="#fffefb",
        background_fill_secondary="*neutral_50",
        block_background_fill="transparent",
        block_border_width="0px",
        block_shadow="none",
        block_padding="0px",
        block_label_background_fill="transparent",
        block_label_border_width="0px",
        block_label_text_color="*neutral_600",
        block_label_text_size="*text_sm",
        block_title_text_color="*neutral_700",
        block_title_text_size="*text_sm",
        block_title_text_weight="600",
        block_info_text_color="*neutral_500",
        border_color_primary="*neutral_200",
        input_background_fill="#fffefb",
        input_background_fill_dark="#26241f",
        input_border_width="1px",
        input_border_color="*neutral_200",
        input_border_color_focus="*primary_500",
        input_shadow_focus="0 0 0 3px #37806d26",
        button_primary_background_fill="*primary_600",
        button_primary_background_fill_hover="*primary_700",
        button_primary_background_fill_dark="*primary_500",
        button_primary_background_fill_hover_dark="*primary_400",
        button_primary_text_color="#fffefb",
        button_secondary_background_fill="transparent",
        button_secondary_background_fill_hover="*neutral_100",
        button_secondary_border_color="*neutral_300",
        button_secondary_text_color="*neutral_800",
        button_border_width="1px",
        button_large_text_weight="600",
        button_transition="background-color 120ms ease, transform 60ms ease",
        slider_color="*primary_600",
        slider_color_dark="*primary_400",
        checkbox_background_color_selected="*primary_600",
        checkbox_border_color_selected="*primary_600",
        checkbox_label_background_fill_selected="*primary_50",
        checkbox_label_background_fill_selected_dark="*primary_900",
        checkbox_label_border_color_selected="*primary_500",
        checkbox_label_text_color_selected="*neutral_900",
        checkbox_label_text_color_selected_dark="*neutral_50",
        loader_color="*primary_600",
        layout_gap="18px",
        **dark,
    )


def style() -> str:
    """The style sheet, with the serif inside of it."""
    faces = [_face(weight, HERE / "fonts" / name) for weight, name in SERIF.items()]
    return "\n".join([*faces, (HERE / "style.css").read_text(encoding="utf-8")])


def _face(weight: int, file: Path) -> str:
    data = base64.b64encode(file.read_bytes()).decode()
    return f'@font-face {{ font-family: Lora; src: url("data:font/woff2;base64,{data}") format("woff2"); font-weight: {weight}; }}'
