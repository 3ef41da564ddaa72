//! Pictures: plain SVG that opens with no network, in light colours on white.
use std::fmt::Write as _;

/// One colour a component or series, told apart also by who sees no red or green.
pub(crate) const COLOURS: [&str; 11] = [
    "#bbbbbb", "#0072b2", "#56b4e9", "#e69f00", "#d55e00", "#cc79a7", "#009e73", "#999999",
    "#f0e442", "#7f3c8d", "#dddddd",
];

/// A picture that is being drawn.
#[derive(Debug)]
pub(crate) struct Svg {
    body: String,
    width: f64,
    height: f64,
}

/// Text within a document.
pub(crate) fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

impl Svg {
    pub(crate) fn new(width: f64, height: f64, title: &str) -> Self {
        let mut svg = Self { body: String::new(), width, height };
        svg.text(12.0, 22.0, "start", 15, title);
        svg
    }

    pub(crate) fn text(&mut self, x: f64, y: f64, anchor: &str, size: u32, text: &str) {
        let text = escape(text);
        let _ = writeln!(
            self.body,
            "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" font-size=\"{size}\">{text}</text>"
        );
    }

    pub(crate) fn rect(&mut self, at: [f64; 4], colour: &str, title: &str) {
        let [x, y, width, height] = at;
        let title = escape(title);
        let _ = writeln!(
            self.body,
            "<rect x=\"{x:.2}\" y=\"{y:.2}\" width=\"{width:.2}\" height=\"{height:.2}\" fill=\"{colour}\"><title>{title}</title></rect>"
        );
    }

    pub(crate) fn line(&mut self, from: (f64, f64), to: (f64, f64), colour: &str) {
        let ((x1, y1), (x2, y2)) = (from, to);
        let _ = writeln!(
            self.body,
            "<line x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\" stroke=\"{colour}\"/>"
        );
    }

    pub(crate) fn area(&mut self, points: &[(f64, f64)], colour: &str, title: &str) {
        let mut path = String::new();
        for (x, y) in points {
            let _ = write!(path, "{x:.1},{y:.1} ");
        }
        let title = escape(title);
        let _ = writeln!(
            self.body,
            "<polygon points=\"{path}\" fill=\"{colour}\"><title>{title}</title></polygon>"
        );
    }

    pub(crate) fn finish(self) -> String {
        let (width, height) = (self.width, self.height);
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width:.0}\" height=\"{height:.0}\" \
             viewBox=\"0 0 {width:.0} {height:.0}\" font-family=\"sans-serif\">\n\
             <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n{}</svg>\n",
            self.body
        )
    }
}

/// Where a chart's values lie.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Frame {
    pub(crate) left: f64,
    pub(crate) top: f64,
    pub(crate) width: f64,
    pub(crate) height: f64,
}

impl Frame {
    /// Lines and figures at the left for values from 0 to `most`.
    pub(crate) fn grid(&self, svg: &mut Svg, most: f64, figure: impl Fn(f64) -> String) {
        for part in 0..=4 {
            let share = f64::from(part) / 4.0;
            let y = self.top + self.height * (1.0 - share);
            svg.line((self.left, y), (self.left + self.width, y), "#dddddd");
            svg.text(self.left - 6.0, y + 4.0, "end", 11, &figure(most * share));
        }
    }

    pub(crate) fn x(&self, share: f64) -> f64 {
        self.left + self.width * share
    }

    pub(crate) fn y(&self, share: f64) -> f64 {
        self.top + self.height * (1.0 - share)
    }
}
