//! Renders entries as Markdown and as a picture.

use super::{Entry, Problem, Row};
use crate::chart::{Bars, Compared, compared, standalone};
use crate::panels::{Panel, Scale, panels};
use bench::Mode;

/// Suites whose times are shown as rates.
const RATES: [&str; 4] = ["ampere", "forward", "backward", "fp8"];

/// The table of a suite, followed by the source of its figures. `None` without rows.
pub(super) fn table(suite: &str, entries: &[Entry], predicted: &[Row]) -> Option<String> {
    if entries.is_empty() {
        return None;
    }
    let rate = RATES.contains(&suite);
    let unit = if rate { "TFLOP/s" } else { "µs" };
    let variants = names(entries, |entry| entry.variants.clone());
    let (peers, _) = contenders(entries);
    let mut header = vec!["problem".to_owned(), "mode".to_owned(), format!("**FlashCore**, {unit}")];
    header.extend(variants.iter().map(|name| format!("{name}, {unit}")));
    header.extend(peers.iter().map(|name| format!("{name}, {unit}")));
    header.extend(["against the best [95 %]".to_owned(), "verdict".to_owned()]);
    let machines = machines(predicted);
    let forecasts = machines.iter().map(|machine| format!("{machine}, predicted {unit}"));
    header.splice(header.len() - 2..header.len() - 2, forecasts);
    let mut lines = vec![line(&header)];
    // Words are left-aligned, figures right-aligned.
    lines.push(line(
        &header
            .iter()
            .enumerate()
            .map(|(i, _)| if i < 2 || i + 1 == header.len() { ":--" } else { "--:" })
            .collect::<Vec<_>>(),
    ));
    for entry in entries {
        let mut cells = cells(entry, &variants, &peers, rate);
        let of = |machine: &String| {
            let same = |row: &&Row| row.device == *machine && row.problem == entry.ours.problem;
            figure(predicted.iter().rev().find(same), rate)
        };
        cells.splice(cells.len() - 2..cells.len() - 2, machines.iter().map(of));
        lines.push(line(&cells));
    }
    lines.push(String::new());
    lines.extend(summary(entries));
    Some(lines.join("\n"))
}

pub(super) fn line<T: AsRef<str>>(cells: &[T]) -> String {
    let cells: Vec<&str> = cells.iter().map(AsRef::as_ref).collect();
    format!("| {} |", cells.join(" | "))
}

/// Names of all peers, or of all variants of FlashCore, in the order of appearance.
fn names(entries: &[Entry], of: fn(&Entry) -> Vec<Row>) -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    for row in entries.iter().flat_map(of) {
        if !names.contains(&row.implementation) {
            names.push(row.implementation);
        }
    }
    names
}

/// A peer has a column if its time is within this factor of the best peer's for some problem.
const CONTENDS: f64 = 1.5;

/// Peers with a column, and the other peers that were timed.
fn contenders(entries: &[Entry]) -> (Vec<String>, Vec<String>) {
    let time = |entry: &Entry, name: &String| {
        entry
            .peers
            .iter()
            .filter(|row| row.implementation == *name && row.fault.is_none())
            .find_map(|row| row.us_median)
    };
    let all = names(entries, |entry| entry.peers.clone());
    let timed = all.into_iter().filter(|name| entries.iter().any(|entry| time(entry, name).is_some()));
    timed.partition(|name| {
        entries.iter().any(|entry| {
            let best = entry.ours.against_best().and_then(|(peer, _)| time(entry, &peer.to_owned()));
            time(entry, name).zip(best).is_some_and(|(us, best)| us <= CONTENDS * best)
        })
    })
}

/// Machines with predictions, in the order of appearance.
fn machines(predicted: &[Row]) -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    for row in predicted {
        if !names.contains(&row.device) {
            names.push(row.device.clone());
        }
    }
    names
}

fn cells(entry: &Entry, variants: &[String], peers: &[String], rate: bool) -> Vec<String> {
    let ours = &entry.ours;
    let best = ours.against_best();
    let mut cells = vec![title(&ours.problem), ours.mode.clone(), figure(Some(ours), rate)];
    let named = |name: &String| entry.variants.iter().find(|row| row.implementation == *name);
    cells.extend(variants.iter().map(|name| figure(named(name), rate)));
    cells.extend(peers.iter().map(|name| {
        let cell = figure(entry.peers.iter().find(|row| row.implementation == *name), rate);
        if best.is_some_and(|(peer, _)| peer == name) { format!("**{cell}**") } else { cell }
    }));
    cells.push(best.map_or("–".into(), |(_, c)| format!("{:.2}× [{:.2}, {:.2}]", c.ratio, c.low, c.high)));
    cells.push(best.map_or("–".into(), |(_, c)| c.verdict.name().to_owned()));
    cells
}

pub(super) fn title(p: &Problem) -> String {
    let heads =
        if p.heads_q == p.heads_kv { p.heads_q.to_string() } else { format!("{}/{}", p.heads_q, p.heads_kv) };
    let seq = if p.seq_q == p.seq_kv { p.seq_q.to_string() } else { format!("{}×{}", p.seq_q, p.seq_kv) };
    let mask = if p.mask == "none" { String::new() } else { format!(" {}", p.mask) };
    let softcap = p.softcap.map_or_else(String::new, |cap| format!(" softcap {cap}"));
    let lse = if p.lse { " lse" } else { "" };
    format!("{} B{} H{heads} S{seq} D{}{mask}{softcap}{lse}", p.dtype, p.batch, p.head_dim)
}

/// A time or a rate. Times that do not count are not shown.
fn figure(row: Option<&Row>, rate: bool) -> String {
    let Some(row) = row else { return "–".into() };
    match (&row.fault, row.us_median, row.tflops) {
        (Some(_), ..) => "n/a".into(),
        (None, _, Some(tflops)) if rate => format!("{tflops:.0}"),
        (None, Some(us), _) if !rate && us >= 100.0 => format!("{us:.0}"),
        (None, Some(us), _) if !rate => format!("{us:.2}"),
        (None, ..) => "–".into(),
    }
}

/// FlashCore's ratios to the best peer with other kinds of launches, L2 warm.
fn variants_against_best(entries: &[Entry]) -> Vec<String> {
    let ratio = |entry: &Entry, name: &String| {
        let (peer, _) = entry.ours.against_best()?;
        let peer = entry.peers.iter().find(|row| row.implementation == peer)?;
        let variant = entry.variants.iter().find(|row| row.implementation == *name && row.fault.is_none())?;
        Some(peer.us_median? / variant.us_median?)
    };
    let warm = || entries.iter().filter(|entry| entry.ours.mode == "warm");
    let of = |name: String| {
        let ratios: Vec<f64> = warm().filter_map(|entry| ratio(entry, &name)).collect();
        (!ratios.is_empty()).then(|| {
            let (mean, least) = mean_and_least(&ratios);
            format!(
                "{name}, L2 warm: geometric mean of {} {mean:.2}× the best peer, least {least:.2}×.  ",
                ratios.len()
            )
        })
    };
    names(entries, |entry| entry.variants.clone()).into_iter().filter_map(of).collect()
}

/// The geometric mean and the least.
pub(super) fn mean_and_least(ratios: &[f64]) -> (f64, f64) {
    let mean = (ratios.iter().map(|r| r.ln()).sum::<f64>() / ratios.len() as f64).exp();
    (mean, ratios.iter().copied().fold(f64::INFINITY, f64::min))
}

/// Mean ratios, errors, disqualified peers with reasons, and the source of the figures.
fn summary(entries: &[Entry]) -> Vec<String> {
    let mut lines = Vec::new();
    for mode in Mode::ALL {
        let words = match mode {
            Mode::Warm => "L2 warm",
            Mode::Cold => "L2 cold",
            Mode::Sustained => "Sustained",
        };
        let ratios: Vec<f64> = entries
            .iter()
            .filter(|entry| entry.ours.mode == mode.name())
            .filter_map(|entry| entry.ours.against_best().map(|(_, c)| c.ratio))
            .collect();
        if !ratios.is_empty() {
            let ((mean, least), n) = (mean_and_least(&ratios), ratios.len());
            lines.push(format!(
                "{words}: geometric mean of {n} {mean:.2}× the best peer, least {least:.2}×.  "
            ));
        }
    }
    lines.extend(variants_against_best(entries));
    let ours = entries.iter().map(|entry| &entry.ours);
    let error = ours.clone().filter_map(|row| row.err_max).fold(0.0, f64::max);
    lines.push(format!("Largest error of ours against f64: {error:.1e}.  "));
    lines.extend(errors_against_peers(entries));
    let (_, slower) = contenders(entries);
    if !slower.is_empty() {
        lines.push(format!(
            "Timed as well, nowhere within {CONTENDS} times the best peer's time: {}.  ",
            slower.join(", ")
        ));
    }
    let mut out: Vec<String> = entries
        .iter()
        .flat_map(|entry| std::iter::once(&entry.ours).chain(&entry.peers))
        .filter(|row| !slower.contains(&row.implementation))
        .filter_map(|row| {
            row.fault.as_ref().map(|why| format!("n/a: {}: {}.  ", row.implementation, told(why)))
        })
        .collect();
    out.sort();
    out.dedup();
    lines.extend(out);
    let mut places: Vec<String> = ours.map(place).collect();
    places.sort();
    places.dedup();
    lines.extend(places);
    lines
}

/// FlashCore's errors as multiples of each peer's on the same inputs, if there are peers.
fn errors_against_peers(entries: &[Entry]) -> Option<String> {
    let mean = |name: &String, error: fn(&Row) -> Option<f64>| {
        let ratio = |entry: &Entry| {
            let peer = entry.peers.iter().find(|row| row.implementation == *name && row.fault.is_none())?;
            Some(error(&entry.ours)? / error(peer)?)
        };
        let ratios: Vec<f64> = entries.iter().filter_map(ratio).filter(|ratio| ratio.is_finite()).collect();
        (!ratios.is_empty()).then(|| mean_and_least(&ratios).0)
    };
    let told = |name: String| {
        let (rel, max) = (mean(&name, |row| row.err_rel)?, mean(&name, |row| row.err_max)?);
        Some(format!("{rel:.2}× and {max:.2}× {name}'s"))
    };
    let told: Vec<String> = contenders(entries).0.into_iter().filter_map(told).collect();
    (!told.is_empty())
        .then(|| format!("‖O − O*‖ / ‖O*‖ and the largest error, geometric means: {}.  ", told.join(", ")))
}

/// A fault for readers: without paths of the measuring machine and without the final full stop.
fn told(why: &str) -> String {
    let words: Vec<&str> = why.split_whitespace().filter(|word| !word.starts_with('/')).collect();
    words.join(" ").trim_end_matches(['.', ',']).to_owned()
}

/// Where and when a row was measured.
pub(super) fn place(row: &Row) -> String {
    place_of(&row.device, &row.driver, row.commit.as_deref(), &row.when)
}

/// The device, the software and the day.
pub(super) fn place_of(device: &str, driver: &str, commit: Option<&str>, when: &str) -> String {
    format!("{device}, {driver}, commit {}, {}.  ", commit.unwrap_or("none"), day_of(when))
}

/// The day of a time.
pub(super) fn day_of(when: &str) -> &str {
    when.split('T').next().unwrap_or_default()
}

/// A picture and its caption: rates as lines over the length, times as bars.
pub(super) fn plot(suite: &str, entries: &[Entry]) -> Option<(String, &'static str)> {
    if RATES.contains(&suite) {
        let caption = "TFLOP/s, L2 warm, over the length of a sequence; a causal mask counts as half.";
        return curves(entries).map(|chart| (chart, caption));
    }
    let caption = "Time of a call, L2 warm. Bars start at 0; each problem has its own scale.";
    times(entries).map(|chart| (chart, caption))
}

/// All contestants' rates over the length, one panel per head dimension and mask.
fn curves(entries: &[Entry]) -> Option<String> {
    let legend: Vec<String> = std::iter::once("FlashCore".to_owned()).chain(contenders(entries).0).collect();
    let mut all: Vec<Panel> = Vec::new();
    for entry in entries.iter().filter(|entry| entry.ours.mode == "warm") {
        let p = &entry.ours.problem;
        let mask = if p.mask == "none" { "full" } else { &p.mask };
        let title = format!("{}, head dim {}, {mask}", p.dtype, p.head_dim);
        let at = all.iter().position(|panel| panel.title == title).unwrap_or_else(|| {
            all.push(Panel { title, lines: (0..legend.len()).map(|number| (number, Vec::new())).collect() });
            all.len() - 1
        });
        let place = |row: &Row| legend.iter().position(|name| *name == row.implementation);
        let peers = entry.peers.iter().filter_map(|row| Some((place(row)?, row)));
        for (line, row) in std::iter::once((0, &entry.ours)).chain(peers) {
            if let (None, Some(rate)) = (&row.fault, row.tflops) {
                all[at].lines[line].1.push((p.seq_kv as f64, rate));
            }
        }
    }
    for (_, points) in all.iter_mut().flat_map(|panel| &mut panel.lines) {
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
    }
    // Full masks to the left.
    all.sort_by_key(|panel| {
        (
            entries.iter().position(|e| panel.title.contains(&format!("dim {},", e.ours.problem.head_dim))),
            !panel.title.ends_with("full"),
        )
    });
    (!all.is_empty()).then(|| standalone(&panels(&all, &legend, "TFLOP/s", Scale::Linear)))
}

/// A bar per library and problem, L2 warm.
fn times(entries: &[Entry]) -> Option<String> {
    let peers = contenders(entries).0;
    let counts = |row: &Row| row.us_median.filter(|_| row.fault.is_none());
    let problems: Vec<Compared> = entries
        .iter()
        .filter(|entry| entry.ours.mode == "warm")
        .filter_map(|entry| {
            let of_peers = peers.iter().filter_map(|name| {
                let row = entry.peers.iter().find(|row| row.implementation == *name)?;
                Some((library(name), counts(row)?))
            });
            let values =
                std::iter::once(("FlashCore".to_owned(), counts(&entry.ours)?)).chain(of_peers).collect();
            Some(Compared { title: title(&entry.ours.problem), values })
        })
        .collect();
    (!problems.is_empty()).then(|| standalone(&compared(&problems, Bars { unit: "µs", full: None })))
}

/// A library's name and version for a picture: in the words of its users, and without the build of the
/// version.
pub(super) fn library(name: &str) -> String {
    const WORDS: [(&str, &str); 6] = [
        ("sdpa-flash", "PyTorch flash"),
        ("sdpa-cudnn", "PyTorch cuDNN"),
        ("sdpa-efficient", "PyTorch efficient"),
        ("sdpa-math", "PyTorch math"),
        ("fa3", "FA3"),
        ("fa4", "FA4"),
    ];
    let release = name.split_once('+').map_or(name, |(release, _)| release);
    let found = WORDS.iter().find_map(|(of, word)| Some(format!("{word}{}", release.strip_prefix(of)?)));
    found.unwrap_or_else(|| release.to_owned())
}

/// The picture of [`times`] of the first problem that every library computes, without a table, and the source
/// of its figures.
pub(super) fn picture(entries: &[Entry]) -> Option<(String, String)> {
    let peers = contenders(entries).0.len();
    let whole = |entry: &&Entry| entry.peers.iter().filter(|row| row.fault.is_none()).count() >= peers;
    // The first alone, so that the picture leaves room on a screen for what stands below.
    let whole: Vec<Entry> = entries.iter().filter(whole).take(1).cloned().collect();
    let caption = "Time of a call, L2 warm, in one process. Bars start at 0. B batch, H heads, S sequence, D head dim; FA\n\
                   FlashAttention.  \n";
    Some((times(&whole)?, format!("{caption}{}", place(&whole.first()?.ours).trim_end())))
}

#[cfg(test)]
mod tests {
    use super::{library, told};

    #[test]
    fn libraries_of_a_picture_have_the_names_of_their_users() {
        let names = ["sdpa-flash 2.11.0+cu130", "fa4 4.0.0b36", "torch 2.15.0+cu132 SDPA", "xformers"];
        let words = ["PyTorch flash 2.11.0", "FA4 4.0.0b36", "torch 2.15.0", "xformers"];
        assert_eq!(names.map(library), words);
    }

    #[test]
    fn faults_are_told_without_paths() {
        let why = "RuntimeError: run, /build/src/api.cpp:397, This build does not support FP16..";
        assert_eq!(told(why), "RuntimeError: run, This build does not support FP16");
        assert_eq!(told("16 TFLOP/s is impossible"), "16 TFLOP/s is impossible");
    }
}
