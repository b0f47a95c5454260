//! Tests of the limits of a run: the size of the grid, and wall-clock time.

use std::sync::Arc;
use std::time::Duration;

use flashcore_emu::{Buffer, EmuError, Options, Report, Stopwatch, run};
use ptx::{Dim3, Kernel, Launch};

fn execute(body: &str, grid: Dim3, options: &Options) -> Result<Report, EmuError> {
    let text =
        format!(".version 7.0\n.target sm_80\n.address_size 64\n.visible .entry k()\n{{\n{body}\nret;\n}}\n");
    let kernel = Kernel {
        module: ptx::parse(&text).unwrap().assume_verified(),
        entry: "k".into(),
        launch: Launch::new(grid, Dim3(32, 1, 1)),
        buffers: Vec::new(),
        tensor_maps: Vec::new(),
        args: Vec::new(),
    };
    let no_buffers: &mut [&mut Buffer] = &mut [];
    run(&kernel, no_buffers, options)
}

/// No CTA of such a grid runs, because the size of the grid already exceeds the budget.
#[test]
fn a_grid_beyond_its_budget_is_refused_before_it_runs() {
    let options = Options { grid_limit: 1 << 31, ..Options::default() };
    let refused = execute("", Dim3(i32::MAX as u32, 1, 1), &options).unwrap_err();
    assert!(matches!(refused, EmuError::GridSize { ctas, .. } if ctas == i32::MAX as u64), "{refused}");
    let said = refused.to_string();
    assert!(said.contains("the grid has 2147483647 CTAs") && said.contains("a smaller grid"), "{said}");
}

#[test]
fn a_run_ends_when_its_time_is_over() {
    let endless = "again:\nbra again;";
    let limit = Duration::from_millis(20);
    let options = Options {
        step_limit: u64::MAX,
        stopwatch: Some(Arc::new(Stopwatch::start(limit))),
        ..Options::default()
    };
    for grid in [Dim3(1, 1, 1), Dim3(64, 1, 1)] {
        assert_eq!(execute(endless, grid, &options).unwrap_err(), EmuError::TimeLimit { limit });
    }
    // Once the limit of a stopwatch is over, no further run starts.
    assert_eq!(execute("", Dim3(1, 1, 1), &options).unwrap_err(), EmuError::TimeLimit { limit });
}

#[test]
fn a_stopwatch_tells_how_far_a_run_is() {
    let stopwatch = Arc::new(Stopwatch::start(Duration::MAX));
    let options = Options { stopwatch: Some(stopwatch.clone()), ..Options::default() };
    execute("", Dim3(5, 2, 1), &options).unwrap();
    assert_eq!(stopwatch.progress(), (10, 10));
}

#[test]
fn a_variable_that_does_not_fit_is_named_in_words() {
    let refused = execute(
        ".local .b8 s[1099511627776];\n.reg .b64 %r;\nmov.u64 %r, s;",
        Dim3(1, 1, 1),
        &Options::default(),
    );
    let said = refused.unwrap_err().to_string();
    assert!(said.contains("1099511627776 bytes") && said.contains(".local `s`"), "{said}");
    assert!(!said.contains("Some("), "{said}");
}
