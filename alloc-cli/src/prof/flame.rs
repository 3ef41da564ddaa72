//! Folded stacks, and flame graphs of them.
use std::collections::BTreeMap;

use serde_json::json;

use super::Output;
use super::analysis::{Analysis, At, Instance, name_of};
use super::profile::{float, whole};
use crate::failure::Failure;

/// What the width of a frame stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Measure {
    /// Bytes that are live
    Live,
    /// Blocks that are live
    Blocks,
    /// Bytes that were allocated up to the end
    Allocated,
}

/// Lines like `weights;main;f;malloc 1234`, sorted; the component at the root.
pub(crate) fn folded(
    a: &Analysis,
    instant: &Instance,
    measure: Measure,
) -> Result<Vec<String>, Failure> {
    let mut stacks: BTreeMap<String, f64> = BTreeMap::new();
    let mut add = |component: u8, site: u32, tag: u32, amount: f64| {
        *stacks.entry(stack(a, component, site, tag)).or_default() += amount;
    };
    match measure {
        Measure::Allocated => {
            for t in &a.profile.last()?.totals {
                add(a.components.of_pair(t.site, t.tag), t.site, t.tag, t.weighted_all_bytes);
            }
        }
        Measure::Live | Measure::Blocks => {
            for block in &instant.live {
                let component = a.component(block, instant.now).0;
                let size = if measure == Measure::Live { float(block.size) } else { 1.0 };
                add(component, block.site, block.tag, block.weight * size);
            }
        }
    }
    Ok(stacks
        .into_iter()
        .map(|(stack, amount)| (stack, whole(amount)))
        .filter(|(_, amount)| *amount > 0)
        .map(|(stack, amount)| format!("{stack} {amount}"))
        .collect())
}

fn stack(a: &Analysis, component: u8, site: u32, tag: u32) -> String {
    let clean = |name: &str| name.replace([';', '\n'], ":");
    let mut stack = name_of(component).to_owned();
    let mut names = a.names(site);
    names.reverse();
    for name in names {
        stack.push(';');
        stack += &clean(name);
    }
    if tag != 0 {
        stack += &format!(";[{}]", clean(&a.tag(tag)));
    }
    stack
}

pub(crate) fn report(a: &Analysis, at: At, measure: Measure) -> Result<Output, Failure> {
    let instant = a.at(at)?;
    let lines = folded(a, &instant, measure)?;
    let picture = draw(a, &lines, &instant.what, measure)?;
    let json = json!({ "moment": instant.what, "stacks": lines });
    Ok(Output { text: lines.join("\n") + "\n", json, picture: Some(picture) })
}

fn draw(a: &Analysis, lines: &[String], what: &str, measure: Measure) -> Result<String, Failure> {
    let mut options = inferno::flamegraph::Options::default();
    let kind = match measure {
        Measure::Live => "live bytes",
        Measure::Blocks => "live blocks",
        Measure::Allocated => "allocated bytes",
    };
    let program = super::symbols::short(&a.profile.program);
    options.title = format!("{program}: {kind}, {what}");
    options.count_name = if measure == Measure::Blocks { "blocks" } else { "bytes" }.to_owned();
    options.colors =
        inferno::flamegraph::color::Palette::Basic(inferno::flamegraph::color::BasicPalette::Mem);
    options.hash = true;
    options.min_width = 0.1;
    let mut svg = Vec::new();
    inferno::flamegraph::from_lines(&mut options, lines.iter().map(String::as_str), &mut svg)
        .map_err(|why| Failure::cannot_run("flame graph", why, "nothing to draw"))?;
    Ok(String::from_utf8_lossy(&svg).into_owned())
}
