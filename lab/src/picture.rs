//! Outcomes as an SVG picture: resident memory over time beside what is live, and below it the
//! faults so far.

use std::error::Error;
use std::path::Path;

use plotters::coord::Shift;
use plotters::prelude::*;

use crate::mib;
use crate::sim::{Outcome, Sample};

const SIZE: (u32, u32) = (1000, 760);
const UPPER_HEIGHT: u32 = 440;
const LEGEND_WIDTH: u32 = 120;
/// An area of the picture.
type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
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
    let (upper, lower) = area.split_vertically(UPPER_HEIGHT);
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
    area: &Area<'_>,
    title: &str,
    unit: &str,
    lines: &[Line<'_>],
) -> Result<(), Box<dyn Error>> {
    let points = |line: &Line<'_>| -> Vec<(f64, f64)> {
        line.samples.iter().map(|sample| (seconds(sample), (line.value)(sample))).collect()
    };
    let all: Vec<(f64, f64)> = lines.iter().flat_map(points).collect();
    let largest = |pick: fn(&(f64, f64)) -> f64| all.iter().map(pick).fold(1.0, f64::max);
    let (right, top) = (largest(|p| p.0), largest(|p| p.1) * 1.05);
    let (plot, side) = area.split_horizontally(SIZE.0 - LEGEND_WIDTH);
    let mut chart = ChartBuilder::on(&plot)
        .caption(title, ("sans-serif", 20))
        .margin(12)
        .x_label_area_size(36)
        .y_label_area_size(64)
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
    // The first is drawn last: where lines meet, it is seen.
    for line in lines.iter().rev() {
        chart.draw_series(LineSeries::new(points(line), line.style))?;
    }
    legend(&side, lines)
}

fn legend(area: &Area<'_>, lines: &[Line<'_>]) -> Result<(), Box<dyn Error>> {
    for (line, y) in lines.iter().zip((56..).step_by(20)) {
        area.draw(&PathElement::new([(0, y), (20, y)], line.style))?;
        area.draw(&Text::new(line.name.to_owned(), (26, y - 7), ("sans-serif", 13)))?;
    }
    Ok(())
}

#[allow(clippy::cast_precision_loss)] // a position on paper
fn seconds(sample: &Sample) -> f64 {
    sample.at_us as f64 / 1e6
}
