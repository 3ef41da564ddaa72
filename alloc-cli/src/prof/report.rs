//! `prof report`: who holds memory, by component, operator or scope, and call site; and how that grew.
use std::collections::HashMap;

use serde_json::{Value, json};

use super::Output;
use super::analysis::{Analysis, At, Sum, name_of, sorted};
use super::growth;
use super::profile::{Profile, float};
use super::table::{Table, bytes, count, percent, size, span};
use crate::failure::Failure;

pub(crate) fn report(
    a: &Analysis,
    earlier: Option<&Profile>,
    at: At,
    top: usize,
) -> Result<Output, Failure> {
    let instant = a.at(at)?;
    let components = a.by_component(&instant);
    let mut total = Sum::default();
    components.iter().for_each(|(_, sum, _)| total.merge(sum));
    let mut text = head(&a.profile, &instant.what);
    text += &format!("live: {} in {} blocks\n\n", total.text(), count(total.blocks));

    let mut table = Table::new(&["component", ">live", ">share", ">blocks", "known by"]);
    for (component, sum, by) in &components {
        let known: Vec<String> = by
            .iter()
            .map(|(by, part)| format!("{} {}", by.word(), percent(*part, sum.bytes)))
            .collect();
        table.row([
            name_of(*component).to_owned(),
            sum.text(),
            percent(sum.bytes, total.bytes),
            count(sum.blocks),
            known.join(", "),
        ]);
    }
    text += &table.text();

    let mut by_tag: HashMap<u32, Sum> = HashMap::new();
    for block in instant.live.iter().filter(|block| block.tag != 0) {
        by_tag.entry(block.tag).or_default().add(block);
    }
    let tags = sorted(by_tag);
    if !tags.is_empty() {
        text += "\n";
        let mut table = Table::new(&[">live", ">blocks", "operator or scope"]);
        for (tag, sum) in tags.iter().take(top) {
            table.row([sum.text(), count(sum.blocks), a.tag(*tag)]);
        }
        text += &table.text();
    }

    let sites = a.by_site(&instant);
    let totals = allocated(&a.profile)?;
    text += "\n";
    let mut table =
        Table::new(&[">live", ">share", ">blocks", ">allocated", "component", "call site"]);
    let mut rows = Vec::new();
    for (site, sum) in sites.iter().take(top) {
        let of = instant.live.iter().find(|block| block.site == *site);
        let component = of.map_or("other", |block| name_of(a.component(block, instant.now).0));
        let allocated = totals.get(site).copied().unwrap_or(0.0);
        table.row([
            sum.text(),
            percent(sum.bytes, total.bytes),
            count(sum.blocks),
            bytes(allocated),
            component.to_owned(),
            a.line(*site, 3),
        ]);
        rows.push(json!({
            "site": site, "component": component, "live_bytes": sum.bytes,
            "error_bytes": sum.error(), "live_blocks": sum.blocks,
            "allocated_bytes": allocated, "stack": a.names(*site),
        }));
    }
    text += &table.text();
    let grown = growth::report(a, earlier, &instant, top.min(10))?;
    let (told, grown) = grown.unwrap_or_default();
    if !told.is_empty() {
        text += &format!("\n{told}");
    }
    let dumps = dumps(&a.profile);
    if dumps.len() > 1 {
        text += "\n";
        let mut table = Table::new(&["dump", ">after", ">live", ">resident", "why"]);
        for point in &dumps {
            table.row([
                if point.number > 0 { point.number.to_string() } else { "-".to_owned() },
                span(point.seconds),
                bytes(point.live),
                if point.resident > 0 { size(point.resident) } else { "-".to_owned() },
                point.reason.clone(),
            ]);
        }
        text += &table.text();
    }
    text += &churn(a, top.min(5))?;
    let components: Vec<Value> = components
        .iter()
        .map(|(component, sum, by)| {
            let by: serde_json::Map<String, Value> =
                by.iter().map(|(by, part)| (by.word().to_owned(), json!(part))).collect();
            json!({
                "component": name_of(*component), "live_bytes": sum.bytes,
                "error_bytes": sum.error(), "live_blocks": sum.blocks, "known_by": by,
            })
        })
        .collect();
    let tags: Vec<Value> = tags
        .iter()
        .map(|(tag, sum)| json!({ "name": a.tag(*tag), "live_bytes": sum.bytes, "live_blocks": sum.blocks }))
        .collect();
    let json = json!({
        "program": a.profile.program, "pid": a.profile.pid, "moment": instant.what,
        "live_bytes": total.bytes, "error_bytes": total.error(), "live_blocks": total.blocks,
        "components": components, "operators": tags, "sites": rows, "growth": grown,
        "symbolized_ms": a.symbolized_in.as_secs_f64() * 1e3,
        "warnings": a.profile.warnings(),
    });
    Ok(Output { text, json, picture: None })
}

/// What a report begins with.
pub(crate) fn head(profile: &Profile, what: &str) -> String {
    let mut text = format!(
        "{} (process {}, thermalloc {}): {what}\n",
        profile.program, profile.pid, profile.version
    );
    for warning in profile.warnings() {
        text += &format!("note: {warning}\n");
    }
    text
}

/// Bytes that each site allocated up to the last dump.
fn allocated(profile: &Profile) -> Result<HashMap<u32, f64>, Failure> {
    let mut by_site = HashMap::new();
    for totals in &profile.last()?.totals {
        *by_site.entry(totals.site).or_default() += totals.weighted_all_bytes;
    }
    Ok(by_site)
}

struct Point {
    number: u64,
    seconds: f64,
    live: f64,
    resident: u64,
    reason: String,
}

fn dumps(profile: &Profile) -> Vec<Point> {
    profile
        .snapshots
        .iter()
        .map(|s| Point {
            number: s.number,
            seconds: profile.seconds(s.time_ns),
            live: s.live.iter().map(|b| b.weight * float(b.size)).sum(),
            resident: s.system.map_or(0, |system| system.resident_bytes),
            reason: s.reason.clone(),
        })
        .collect()
}

/// What was allocated most, whether it lives or not: what the allocator's time goes to.
fn churn(a: &Analysis, top: usize) -> Result<String, Failure> {
    let mut sums: HashMap<u32, Sum> = HashMap::new();
    let mut all = 0.0;
    for totals in &a.profile.last()?.totals {
        let sum = sums.entry(totals.site).or_default();
        sum.bytes += totals.weighted_all_bytes;
        sum.blocks += totals.weighted_all_blocks;
        all += totals.weighted_all_bytes;
    }
    let mut table = Table::new(&[">allocated", ">share", ">blocks", "call site"]);
    for (site, sum) in sorted(sums).into_iter().take(top) {
        let share = percent(sum.bytes, all);
        table.row([bytes(sum.bytes), share, count(sum.blocks), a.line(site, 3)]);
    }
    Ok(format!("\nallocated in all: {}\n{}", bytes(all), table.text()))
}
