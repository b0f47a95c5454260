//! Tests that need something which this machine lacks.

use std::fs::OpenOptions;
use std::io::Write;

/// The environment variable that names the file to which [`not_run`] adds a line for each test that did not
/// run. `cargo xtask test` counts the lines and prints them at its end.
pub const LIST: &str = "FLASHCORE_NOT_RUN";

/// The environment variable with which [`not_run`] fails instead.
pub const REQUIRE: &str = "FLASHCORE_REQUIRE_ALL";

/// Records that the calling test did not run. A test that lacks what it needs passes, so without this record
/// it would look like one that ran.
///
/// # Panics
/// If [`REQUIRE`] is set, or the list cannot be written.
pub fn not_run(why: impl std::fmt::Display) {
    assert!(std::env::var_os(REQUIRE).is_none(), "not run: {why}");
    let thread = std::thread::current();
    let name = thread.name().unwrap_or("a test");
    // The test harness captures what macros print.
    std::io::stderr().write_all(format!("not run: {name}: {why}\n").as_bytes()).unwrap();
    if let Some(list) = std::env::var_os(LIST) {
        let program = std::env::current_exe().ok();
        let program = program.as_ref().and_then(|program| program.file_stem()).unwrap_or_default();
        // Cargo adds a hash to the name of a test program.
        let program = program.to_string_lossy();
        let program = program.rsplit_once('-').map_or(&*program, |(name, _)| name);
        let line = format!("{program}: {name}: {why}\n");
        let file = OpenOptions::new().append(true).create(true).open(list);
        file.and_then(|mut file| file.write_all(line.as_bytes())).unwrap();
    }
}
