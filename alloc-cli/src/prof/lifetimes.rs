//! `prof lifetimes`: how long blocks live, by site. What dies young is the allocator's main work, and what
//! lives to the end is what memory is needed for.
use std::collections::HashMap;

use serde_json::json;

use super::Output;
use super::analysis::Analysis;
use super::report::head;
use super::svg::{COLOURS, Frame, Svg};
use super::table::{Table, count, percent, span};
use crate::failure::Failure;

pub(crate) fn report(a: &Analysis, top: usize) -> Result<Output, Failure> {
    // The end of a log without a dump has none.
    let with_lifetimes = a.profile.snapshots.iter().rev().find(|s| !s.lifetimes.is_empty());
    let s = match with_lifetimes {
        Some(s) => s,
        None => a.profile.last()?,
    };
    let mut by_site: HashMap<u32, (Vec<f64>, Vec<f64>)> = HashMap::new();
    for l in &s.lifetimes {
        let (times, steps) = by_site.entry(l.site).or_default();
        add(times, &l.times);
        add(steps, &l.steps);
    }
    let (mut times, mut steps) = (Vec::new(), Vec::new());
    for (site_times, site_steps) in by_site.values() {
        add(&mut times, site_times);
        add(&mut steps, site_steps);
    }
    let all: f64 = times.iter().sum();
    let live: f64 = s.live.iter().map(|block| block.weight).sum();
    let mut text = head(&a.profile, &format!("dump {} ({})", s.number, s.reason));
    text += &format!("{} blocks were freed, {} are live\n\n", count(all), count(live));
    let mut table = Table::new(&[">lived less than", ">blocks", ">share", ""]);
    let most = times.iter().copied().fold(1.0, f64::max);
    for (bin, blocks) in times.iter().enumerate().filter(|(_, blocks)| **blocks >= 0.5) {
        table.row([
            if bin + 1 == times.len() { "longer".to_owned() } else { span(end_of(bin)) },
            count(*blocks),
            percent(*blocks, all),
            "#".repeat(super::profile::whole(blocks / most * 40.0).try_into().unwrap_or(0)),
        ]);
    }
    text += &table.text();
    let mut sites: Vec<(u32, Vec<f64>, Vec<f64>)> =
        by_site.into_iter().map(|(site, (times, steps))| (site, times, steps)).collect();
    let of = |times: &Vec<f64>| times.iter().sum::<f64>();
    sites.sort_by(|a, b| of(&b.1).total_cmp(&of(&a.1)).then(a.0.cmp(&b.0)));
    text += "\n";
    let mut table = Table::new(&[">freed", ">median", ">90 %", ">same step", "call site"]);
    for (site, times, steps) in sites.iter().take(top) {
        let in_step = percent(steps.first().copied().unwrap_or(0.0), steps.iter().sum());
        table.row([
            count(of(times)),
            quantile(times, 0.5),
            quantile(times, 0.9),
            in_step,
            a.line(*site, 3),
        ]);
    }
    text += &table.text();
    let json = json!({
        "freed_blocks": all, "live_blocks": live,
        "bins": times.iter().enumerate().map(|(bin, blocks)| json!({ "below_s": end_of(bin), "blocks": blocks })).collect::<Vec<_>>(),
        "steps": steps,
        "sites": sites.iter().take(500).map(|(site, times, steps)| json!({
            "stack": a.names(*site), "times": times, "steps": steps })).collect::<Vec<_>>(),
    });
    Ok(Output { text, json, picture: Some(draw(&times, all)) })
}

fn add(sum: &mut Vec<f64>, part: &[f64]) {
    sum.resize(sum.len().max(part.len()), 0.0);
    sum.iter_mut().zip(part).for_each(|(sum, part)| *sum += part);
}

/// Bin i ends at 2^(i+1) us.
fn end_of(bin: usize) -> f64 {
    2e-6 * 2f64.powi(i32::try_from(bin).unwrap_or(i32::MAX))
}

fn quantile(times: &[f64], share: f64) -> String {
    let all: f64 = times.iter().sum();
    let mut seen = 0.0;
    let bin = times.iter().position(|blocks| {
        seen += blocks;
        seen >= share * all
    });
    bin.map_or("-".to_owned(), |bin| format!("< {}", span(end_of(bin))))
}

fn draw(times: &[f64], all: f64) -> String {
    let mut svg = Svg::new(800.0, 360.0, "How long freed blocks lived");
    let frame = Frame { left: 70.0, top: 40.0, width: 700.0, height: 260.0 };
    let most = times.iter().copied().fold(1.0, f64::max);
    frame.grid(&mut svg, most, count);
    #[allow(clippy::cast_precision_loss, reason = "a few dozen bins")]
    let wide = 1.0 / times.len().max(1) as f64;
    for (bin, blocks) in times.iter().enumerate() {
        #[allow(clippy::cast_precision_loss, reason = "a few dozen bins")]
        let at = bin as f64 * wide;
        let title = format!(
            "below {}: {} blocks, {}",
            span(end_of(bin)),
            count(*blocks),
            percent(*blocks, all)
        );
        let height = frame.height * blocks / most;
        let y = frame.y(0.0) - height;
        svg.rect([frame.x(at) + 1.0, y, frame.width * wide - 2.0, height], COLOURS[1], &title);
        if bin % 4 == 0 {
            svg.text(frame.x(at), 318.0, "middle", 11, &span(end_of(bin)));
        }
    }
    svg.finish()
}
