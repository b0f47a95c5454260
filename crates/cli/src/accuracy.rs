//! The command `flashcore accuracy`: prints or draws the error of attention on 8-bit inputs over the number
//! of keys.

use std::io::Write;
use std::path::Path;
use std::time::Instant;

use bench::provenance::Provenance;
use check::accuracy::{Draw, Point, STEP, Scheme, errors};
use host::store;
use serde_json::{Value, json};

use crate::args::Accuracy;
use crate::error::CliError;
use crate::progress::Progress;
use crate::terminal::one_line;
use crate::{Status, source, table, unless_closed};

/// Smallest and largest number of keys of a curve.
const FEWEST: usize = 512;
const MOST: usize = 1 << 20;

pub fn accuracy(args: &Accuracy) -> Result<Status, CliError> {
    if !args.keys.is_power_of_two() || !(FEWEST..=MOST).contains(&args.keys) {
        return Err(CliError::Argument {
            argument: "--keys",
            value: args.keys.to_string(),
            accepted: format!("a power of two from {FEWEST} to {MOST}"),
        });
    }
    if let Some(out) = &args.out {
        source::not_beside_json("--out", out, args.json)?;
        store::writable(out)?;
    }
    // One thread computes the curves.
    let provenance = Provenance::of_cpu(Path::new("."), 1);
    if args.evidence.is_some() && provenance.commit.is_none() {
        return Err(CliError::Unclean);
    }
    let default = Path::new("evidence/emulator.jsonl");
    let evidence = args.evidence.as_ref().map(|given| given.as_deref().unwrap_or(default));
    evidence.map_or(Ok(()), store::appendable)?;
    let curves = curves(args.keys, args.json);
    if let Some(file) = evidence {
        for row in rows(&curves, &provenance) {
            store::append_line(file, &row.to_string())?;
        }
    }
    if let Some(out) = &args.out {
        store::write(out, report::accuracy::page(&curves).as_bytes())?;
        if store::is_standard(out) {
            return Ok(Status::Passed);
        }
    }
    let mut out = crate::terminal::out();
    unless_closed(
        if args.json { out.json("accuracy", &object(&curves)) } else { print(&mut out, args, &curves) }
            .map_err(CliError::from),
    )?;
    Ok(Status::Passed)
}

/// The errors of each distribution at each power of two of keys. Without `json` the progress is shown.
fn curves(most: usize, json: bool) -> Vec<(Draw, Vec<Point>)> {
    const SEED: u64 = 1;
    let lengths = || (0..).map(|i| FEWEST << i).take_while(|&keys| keys <= most);
    debug_assert!(lengths().all(|keys| keys.is_multiple_of(STEP)));
    // In percent: the work grows with the keys.
    let progress = if json { Progress::silent() } else { Progress::new(Some(100)) };
    let all = Draw::ALL.len() * lengths().sum::<usize>();
    let (mut done, start) = (0, Instant::now());
    let mut points_of = |draw: Draw| {
        let points = lengths().flat_map(|keys| {
            let left = match done {
                0 => String::new(),
                _ => format!(
                    "; about {:.0} s left",
                    start.elapsed().as_secs_f64() * (all - done) as f64 / done as f64
                ),
            };
            progress.at((100 * done / all) as u64, &format!("{}, {keys} keys{left}", draw.name()));
            done += keys;
            errors(draw, keys, SEED)
        });
        (draw, points.collect())
    };
    Draw::ALL.map(&mut points_of).into()
}

/// The rows of evidence: one for each error, with the provenance of all.
fn rows(curves: &[(Draw, Vec<Point>)], provenance: &Provenance) -> Vec<Value> {
    let points = curves.iter().flat_map(|(draw, points)| points.iter().map(move |point| (draw, point)));
    points
        .map(|(draw, Point { keys, scheme, relative })| {
            let mut row = json!(provenance);
            for (name, value) in [
                ("suite", json!("accuracy")),
                ("distribution", json!(draw)),
                ("keys", json!(keys)),
                ("scheme", json!(scheme)),
                ("relative", json!(relative)),
            ] {
                row[name] = value;
            }
            row
        })
        .collect()
}

fn object(curves: &[(Draw, Vec<Point>)]) -> Value {
    let curves: Vec<Value> =
        curves.iter().map(|(draw, points)| json!({ "distribution": draw, "points": points })).collect();
    json!({ "curves": curves })
}

fn print(out: &mut impl Write, args: &Accuracy, curves: &[(Draw, Vec<Point>)]) -> std::io::Result<()> {
    writeln!(
        out,
        "Error of attention on e4m3 inputs against f64, in % of the output (root mean square), by the\n\
         emulator's model of Hopper's tensor cores. No kernel ran.\n"
    )?;
    for sentence in report::accuracy::learnt(curves) {
        writeln!(out, "{sentence}")?;
    }
    writeln!(out)?;
    let header = ["inputs", "keys"].into_iter().chain(Scheme::ALL.map(Scheme::name));
    let row = |draw: Draw, points: &[Point]| {
        let cells = [draw.name().to_owned(), points[0].keys.to_string()];
        cells.into_iter().chain(points.iter().map(|p| format!("{:.2}", 100.0 * p.relative))).collect()
    };
    let rows: Vec<Vec<String>> = curves
        .iter()
        .flat_map(|(draw, points)| points.chunks(Scheme::ALL.len()).map(|points| row(*draw, points)))
        .collect();
    table::print(out, &header.collect::<Vec<_>>(), &rows)?;
    match &args.out {
        None => Ok(()),
        Some(page) => writeln!(out, "\npage: {}", one_line(&page.to_string_lossy())),
    }
}
