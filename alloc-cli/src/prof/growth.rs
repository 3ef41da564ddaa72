//! Growth by call site: over the life of a file up to the moment of the report, or from another file of the
//! process on. Says what has grown, not whether it should have: that is `leaks`.
use std::collections::{BTreeMap, HashMap};

use serde_json::{Value, json};
use thermalloc_prof_format::Block;

use super::analysis::{Analysis, Instance, name_of};
use super::profile::{Profile, Snapshot, float, replay};
use super::table::{Table, bytes, span};
use crate::failure::Failure;

/// Moments that a site is shown at.
const MOMENTS: usize = 4;

/// What was live at one time.
struct Point {
    time_ns: u64,
    live: Vec<Block>,
}

/// How one site grew.
#[derive(Debug)]
struct Grown {
    site: u32,
    growth: f64,
    /// The standard error of it.
    error: f64,
    at: Vec<f64>,
}

/// The table and its JSON; nothing where there is one moment only.
pub(crate) fn report(
    a: &Analysis,
    earlier: Option<&Profile>,
    instant: &Instance,
    top: usize,
) -> Result<Option<(String, Value)>, Failure> {
    let points = points(&a.profile, earlier, instant)?;
    let [first, .., last] = points.as_slice() else { return Ok(None) };
    let seconds = float(last.time_ns.saturating_sub(first.time_ns)) / 1e9;
    let grown = by_site(&points);
    let when = |point: &Point| a.profile.seconds(point.time_ns);
    let head: Vec<String> =
        points.iter().map(|point| format!(">at {}", span(when(point)))).collect();
    let mut columns = vec![">growth", ">+-", ">a second"];
    columns.extend(head.iter().map(String::as_str));
    columns.extend(["component", "call site"]);
    let mut table = Table::new(&columns);
    let component = |site| {
        let of = instant.live.iter().find(|block| block.site == site);
        of.map_or("other", |block| name_of(a.component(block, instant.now).0))
    };
    for row in grown.iter().filter(|row| row.growth > 0.0).take(top) {
        let mut cells =
            vec![bytes(row.growth), bytes(row.error), bytes(row.growth / seconds.max(1e-9))];
        cells.extend(row.at.iter().map(|sum| bytes(*sum)));
        cells.extend([component(row.site).to_owned(), a.line(row.site, 3)]);
        table.row(cells);
    }
    let [up, down] =
        [1.0, -1.0].map(|sign| grown.iter().map(|row| (row.growth * sign).max(0.0)).sum::<f64>());
    let text = format!(
        "growth by call site, from {} to {}: {} more, {} less\n{}",
        span(when(first)),
        span(when(last)),
        bytes(up),
        bytes(down),
        table.text()
    );
    let rows: Vec<Value> = grown
        .iter()
        .take(200)
        .map(|row| {
            json!({
                "site": row.site, "growth_bytes": row.growth, "error_bytes": row.error,
                "bytes_per_second": row.growth / seconds.max(1e-9), "live_bytes": row.at,
                "component": component(row.site), "stack": a.names(row.site),
            })
        })
        .collect();
    let json = json!({ "seconds": points.iter().map(when).collect::<Vec<_>>(), "sites": rows });
    Ok(Some((text, json)))
}

fn points(
    profile: &Profile,
    earlier: Option<&Profile>,
    instant: &Instance,
) -> Result<Vec<Point>, Failure> {
    let now = Point { time_ns: instant.now.time_ns, live: instant.live.clone() };
    if let Some(earlier) = earlier {
        if earlier.pid != profile.pid {
            return Err(Failure::cannot_run(
                "profiles",
                "they are of different processes",
                "'thermalloc prof compare' compares runs",
            ));
        }
        let before = of_snapshot(earlier.last()?);
        let in_order = before.time_ns <= now.time_ns;
        return Ok(if in_order { vec![before, now] } else { vec![now, before] });
    }
    let mut points = if profile.events.is_empty() {
        of_dumps(profile, now.time_ns)
    } else {
        of_events(profile, now.time_ns)
    };
    points.push(now);
    Ok(points)
}

fn of_snapshot(s: &Snapshot) -> Point {
    Point { time_ns: s.time_ns, live: s.live.clone() }
}

/// Some dumps before that time, the first among them.
fn of_dumps(profile: &Profile, until_ns: u64) -> Vec<Point> {
    let before: Vec<&Snapshot> =
        profile.snapshots.iter().filter(|s| s.time_ns < until_ns).collect();
    let wanted = before.len().min(MOMENTS - 1);
    (0..wanted).map(|i| of_snapshot(before[i * before.len() / wanted])).collect()
}

/// The states at equal parts of the time up to then.
fn of_events(profile: &Profile, until_ns: u64) -> Vec<Point> {
    let begin = profile.time_ns;
    let part = until_ns.saturating_sub(begin) / MOMENTS as u64;
    let mut live = BTreeMap::new();
    let mut events = profile.events.iter().peekable();
    (1..MOMENTS as u64)
        .map(|i| {
            let time_ns = begin + i * part;
            while let Some(event) = events.next_if(|event| event.time_ns() <= time_ns) {
                replay(&mut live, event);
            }
            Point { time_ns, live: live.values().copied().collect() }
        })
        .collect()
}

/// What grew most first, what shrank most last.
fn by_site(points: &[Point]) -> Vec<Grown> {
    let mut sites: HashMap<u32, Grown> = HashMap::new();
    let fresh = |site| Grown { site, growth: 0.0, error: 0.0, at: vec![0.0; points.len()] };
    for (i, point) in points.iter().enumerate() {
        for block in &point.live {
            let row = sites.entry(block.site).or_insert_with(|| fresh(block.site));
            row.at[i] += block.weight * float(block.size);
        }
    }
    let ends = points.first().zip(points.last());
    let (first, last) = ends.map_or((&[][..], &[][..]), |(a, b)| (&a.live[..], &b.live[..]));
    let serials = |live: &[Block]| -> HashMap<u64, u64> {
        live.iter().map(|block| (block.serial, block.size)).collect()
    };
    let (old, new) = (serials(first), serials(last));
    // Blocks that are in both are no part of the difference, nor of its error.
    let came = last.iter().filter(|block| old.get(&block.serial) != Some(&block.size));
    let went = first.iter().filter(|block| new.get(&block.serial) != Some(&block.size));
    for block in came.chain(went) {
        if let Some(row) = sites.get_mut(&block.site) {
            row.error += block.weight * (block.weight - 1.0) * float(block.size).powi(2);
        }
    }
    let mut rows: Vec<Grown> = sites.into_values().collect();
    for row in &mut rows {
        row.growth = row.at.last().unwrap_or(&0.0) - row.at.first().unwrap_or(&0.0);
        row.error = row.error.sqrt();
    }
    rows.sort_by(|a, b| b.growth.total_cmp(&a.growth).then(a.site.cmp(&b.site)));
    rows
}

#[cfg(test)]
mod tests {
    use super::super::classes::Moment;
    use super::super::profile::Event;
    use super::*;
    use thermalloc_prof_format::Free;

    fn block(site: u32, serial: u64, size: u64, weight: f64) -> Block {
        Block { site, serial, size, weight, time_ns: serial * 10, ..Block::default() }
    }

    fn snapshot(time_ns: u64, live: Vec<Block>) -> Snapshot {
        Snapshot { time_ns, number: time_ns, live, ..Snapshot::default() }
    }

    fn instant(s: &Snapshot) -> Instance {
        Instance { what: String::new(), now: Moment::of(s), live: s.live.clone() }
    }

    /// Site 1 grows, 2 stays, 3 shrinks.
    fn dumps() -> Profile {
        let stays = block(2, 1, 500, 4.0);
        let snapshots = vec![
            snapshot(100, vec![stays, block(3, 2, 70, 1.0)]),
            snapshot(200, vec![stays, block(1, 3, 100, 1.0)]),
            snapshot(300, vec![stays, block(1, 3, 100, 1.0), block(1, 4, 10, 3.0)]),
        ];
        Profile { pid: 1, snapshots, ..Profile::default() }
    }

    #[test]
    fn dumps_are_followed_site_by_site() {
        let profile = dumps();
        let points = points(&profile, None, &instant(&profile.snapshots[2])).unwrap();
        let rows = by_site(&points);
        let told: Vec<(u32, f64, Vec<f64>)> =
            rows.iter().map(|row| (row.site, row.growth, row.at.clone())).collect();
        assert_eq!(
            told,
            [
                (1, 130.0, vec![0.0, 100.0, 130.0]),
                (2, 0.0, vec![2000.0; 3]),
                (3, -70.0, vec![70.0, 0.0, 0.0])
            ]
        );
        assert_eq!(rows[1].error, 0.0, "the same block");
        assert!((rows[0].error - (3.0f64 * 2.0 * 100.0).sqrt()).abs() < 1e-9);
    }

    #[test]
    fn two_files_are_set_side_by_side_in_their_order() {
        let mut early = dumps();
        let late = early.clone();
        early.snapshots.truncate(1);
        let growth = |of: &Profile, with: &Profile| {
            let now = instant(of.last().unwrap());
            by_site(&points(of, Some(with), &now).unwrap())[0].growth
        };
        assert_eq!(growth(&late, &early), 130.0);
        assert_eq!(growth(&early, &late), 130.0, "whichever is named first");
        let other = Profile { pid: 2, ..early.clone() };
        assert!(points(&late, Some(&other), &instant(late.last().unwrap())).is_err());
    }

    #[test]
    fn events_are_followed_at_equal_times() {
        let mut profile = Profile { pid: 1, ..Profile::default() };
        for serial in 1..=40 {
            profile.events.push(Event::Alloc(block(1, serial, 10, 1.0)));
            if serial % 2 == 0 {
                let free = Free { serial, time_ns: serial * 10, ..Free::default() };
                profile.events.push(Event::Free(free));
            }
        }
        let now = Moment { time_ns: 400, step: 0 };
        let live = (1..=40).step_by(2).map(|serial| block(1, serial, 10, 1.0)).collect();
        let instant = Instance { what: String::new(), now, live };
        let points = points(&profile, None, &instant).unwrap();
        assert_eq!(by_site(&points)[0].at, [50.0, 100.0, 150.0, 200.0]);
    }
}
