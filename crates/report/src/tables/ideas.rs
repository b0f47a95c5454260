//! The table of ideas: the effect of another value of one gene.

use super::render::{line, place, title};
use super::{OURS, Row};

/// One line per variant and one column per problem: the variant's time relative to the plan's. `None` without
/// rows.
pub(super) fn table(rows: &[Row]) -> Option<String> {
    let mut own: Vec<&Row> = rows.iter().filter(|row| row.is_ours()).collect();
    // Only the newest run of each problem counts.
    own.sort_by(|a, b| (&a.problem, &b.when).cmp(&(&b.problem, &a.when)));
    own.dedup_by(|a, b| a.problem == b.problem);
    if own.is_empty() {
        return None;
    }
    let of = |own: &Row, variant: &str| {
        let same =
            |row: &&Row| row.run == own.run && row.problem == own.problem && row.implementation == variant;
        rows.iter()
            .find(same)
            .filter(|row| row.fault.is_none())
            .and_then(|row| Some(row.us_median? / own.us_median?))
    };
    let mut variants: Vec<&str> = Vec::new();
    for row in own.iter().flat_map(|own| rows.iter().filter(|row| row.run == own.run && !row.is_ours())) {
        if !variants.contains(&row.implementation.as_str()) {
            variants.push(&row.implementation);
        }
    }
    // Values of the same gene are adjacent.
    variants.sort_by_key(|name| name.split(' ').nth(1).map(str::to_owned));
    let mut lines = vec![
        line(
            &[
                vec!["time, in that of the plan".to_owned()],
                own.iter().map(|row| title(&row.problem)).collect(),
            ]
            .concat(),
        ),
        line(&[vec![":--"], vec!["--:"; own.len()]].concat()),
        line(
            &[vec!["the plan, µs".to_owned()], own.iter().map(|row| time(row.us_median)).collect()].concat(),
        ),
    ];
    for variant in variants {
        let name = variant.strip_prefix(OURS).unwrap_or(variant).trim().to_owned();
        let cells =
            own.iter().map(|own| of(own, variant).map_or("–".into(), |ratio| format!("{ratio:.3}")));
        lines.push(line(&std::iter::once(name).chain(cells).collect::<Vec<_>>()));
    }
    lines.push(String::new());
    let mut places: Vec<String> = own.iter().map(|row| place(row)).collect();
    places.sort();
    places.dedup();
    lines.extend(places);
    Some(lines.join("\n"))
}

fn time(us: Option<f64>) -> String {
    us.map_or("–".into(), |us| format!("{us:.2}"))
}
