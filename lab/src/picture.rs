//! Outcomes as an SVG picture: resident memory over time beside what is live, and below it the
//! faults so far.

use std::error::Error;
use std::path::Path;

use plotters::chart::SeriesLabelPosition;
use plotters::prelude::*;

use crate::mib;
use crate::sim::{Outcome, Sample};

const SIZE: (u32, u32) = (1000, 760);
/// Colours that differ also for who does not see red from green (Okabe and Ito).
const COLOURS: [RGBColor; 6] = [
    RGBColor(213, 94, 0),
    RGBColor(0, 114, 178),
    RGBColor(86, 180, 233),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(130, 130, 130),
];

/// What a panel shows of a sample.
type Value = fn(&Sample) -> f64;

struct Line<'a> {
    name: &'a str,
    samples: &'a [Sample],
    value: Value,
    style: ShapeStyle,
}

/// Draws the picture into a file.
///
/// # Errors
/// Where there is nothing to draw or the file can't be written.
pub fn draw(title: &str, outcomes: &[Outcome], path: &Path) -> Result<(), Box<dyn Error>> {
    let first = outcomes.first().ok_or("nothing to draw")?;
    let area = SVGBackend::new(path, SIZE).into_drawing_area();
    area.fill(&WHITE)?;
    let (upper, lower) = area.split_vertically(440);
    let lines = |value: Value, width| {
        outcomes.iter().zip(COLOURS.iter().cycle()).map(move |(outcome, colour)| Line {
            name: outcome.policy,
            samples: &outcome.samples,
            value,
            style: colour.stroke_width(width),
        })
    };
    let live = Line {
        name: "live",
        samples: &first.samples,
        value: |sample| mib(sample.live),
        style: BLACK.mix(0.35).stroke_width(1),
    };
    let resident: Vec<Line> =
        std::iter::once(live).chain(lines(|sample| mib(sample.resident), 2)).collect();
    panel(&upper, &format!("{title}: resident memory"), "MiB", &resident)?;
    #[allow(clippy::cast_precision_loss)] // a position on paper
    let faults: Vec<Line> = lines(|sample| sample.faults as f64 / 1000.0, 2).collect();
    panel(&lower, "page faults so far", "thousands", &faults)?;
    area.present()?;
    Ok(())
}

fn panel(
    area: &DrawingArea<SVGBackend<'_>, plotters::coord::Shift>,
    title: &str,
    unit: &str,
    lines: &[Line<'_>],
) -> Result<(), Box<dyn Error>> {
    let points = |line: &Line<'_>| -> Vec<(f64, f64)> {
        line.samples.iter().map(|sample| (seconds(sample), (line.value)(sample))).collect()
    };
    let all: Vec<(f64, f64)> = lines.iter().flat_map(points).collect();
    let largest = |pick: fn(&(f64, f64)) -> f64| all.iter().map(pick).fold(1.0, f64::max);
    let (right, top) = (largest(|p| p.0), largest(|p| p.1) * 1.08);
    let mut chart = ChartBuilder::on(area)
        .caption(title, ("sans-serif", 20))
        .margin(12)
        .x_label_area_size(36)
        .y_label_area_size(70)
        .build_cartesian_2d(0.0..right, 0.0..top)?;
    chart
        .configure_mesh()
        .light_line_style(WHITE)
        .bold_line_style(BLACK.mix(0.12))
        .x_desc("seconds")
        .y_desc(unit)
        .x_label_formatter(&|x| format!("{x:.0}"))
        .y_label_formatter(&|y| format!("{y:.0}"))
        .label_style(("sans-serif", 13))
        .draw()?;
    for line in lines {
        let style = line.style;
        chart
            .draw_series(LineSeries::new(points(line), style))?
            .label(line.name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], style));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperRight)
        .background_style(WHITE.mix(0.85))
        .border_style(BLACK.mix(0.2))
        .label_font(("sans-serif", 13))
        .draw()?;
    Ok(())
}

#[allow(clippy::cast_precision_loss)] // a position on paper
fn seconds(sample: &Sample) -> f64 {
    sample.at_us as f64 / 1e6
}
