//! Long tests of which one run of the test command takes a part, so that a few runs take all.

use std::sync::LazyLock;

/// The environment variable with the number that chooses the part: `cargo xtask test` takes it from the hash
/// of the commit. Without the variable, tests run all of their cases.
pub const SHARE: &str = "FLASHCORE_SHARE";

/// Whether the case with this index runs, in a test that is divided into `parts`. The part with the number 0
/// has the case 0.
///
/// # Panics
/// If [`SHARE`] is no number.
pub fn is_due(index: usize, parts: usize) -> bool {
    static CHOSEN: LazyLock<Option<usize>> = LazyLock::new(|| {
        let number = std::env::var(SHARE).ok()?;
        Some(
            number
                .parse()
                .unwrap_or_else(|_| panic!("invalid value '{number}' for {SHARE}: expected a number")),
        )
    });
    belongs(index, parts, *CHOSEN)
}

fn belongs(index: usize, parts: usize, chosen: Option<usize>) -> bool {
    chosen.is_none_or(|chosen| index % parts == chosen % parts)
}

#[cfg(test)]
mod tests {
    use super::belongs;

    #[test]
    fn every_case_belongs_to_one_part() {
        for index in 0..12 {
            for parts in 1..5 {
                let times = (7..7 + parts).filter(|&chosen| belongs(index, parts, Some(chosen))).count();
                assert_eq!(times, 1, "{index} {parts}");
                assert!(belongs(index, parts, None));
            }
        }
    }
}
