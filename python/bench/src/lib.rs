//! `flashcore_bench._bench`: the Rust part of the Python package `flashcore-bench`. It holds the harness of
//! the crate `bench`, which the package `flashcore-attn` need not carry.

mod model;
mod race;

use flashcore::AttentionError;
use problem::{Band, DTypes, Layout, Problem, Score};
use pyo3::prelude::*;

#[pymodule]
fn _bench(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(race::bench_suites, module)?)?;
    module.add_function(wrap_pyfunction!(race::random_problems, module)?)?;
    module.add_function(wrap_pyfunction!(model::model_problems, module)?)?;
    module.add_class::<model::CpuSession>()?;
    module.add_class::<race::Session>()?;
    module.add_class::<race::Race>()?;
    Ok(())
}

/// A problem as Python states it: batch, query heads, KV heads, query length, KV length, head dim; dtype;
/// mask; softcap.
type Stated = ((usize, usize, usize, usize, usize, usize), String, String, Option<f32>);

/// The problem of a statement, with dense tensors.
fn problem(
    ((batch, heads_q, heads_kv, seq_q, seq_kv, dim), dtype, mask, softcap): &Stated,
) -> PyResult<Problem> {
    let dtypes: DTypes = dtype.parse().map_err(argument)?;
    let band: Band = mask.parse().map_err(argument)?;
    let score = Score { softcap: *softcap, ..Score::default() };
    let problem = Problem::new(*batch, *heads_q, *seq_q, *dim, dtypes);
    let problem = Problem { heads_kv: *heads_kv, seq_kv: *seq_kv, band, score, ..problem };
    let problem = problem.with_layout(Layout::Bhsd);
    problem.check().map_err(argument)?;
    Ok(problem)
}

/// The statement of a problem.
fn stated(p: &Problem) -> Stated {
    let extents = (p.batch, p.heads_q, p.heads_kv, p.seq_q, p.seq_kv, p.head_dim);
    (extents, p.dtypes.to_string(), p.band.to_string(), p.score.softcap)
}

/// The exception of `flashcore_attn` for a value that no implementation could accept.
fn argument(error: impl ToString) -> PyErr {
    exception("ArgumentError", &error.to_string())
}

/// The exception for an error of the GPU or its driver.
fn device(error: impl ToString) -> PyErr {
    exception("DeviceError", &error.to_string())
}

/// The exception for a kernel that does not fit the problem or the GPU.
fn unsupported(error: impl ToString) -> PyErr {
    exception("UnsupportedError", &error.to_string())
}

/// The exception for an error of the façade.
fn refused(error: AttentionError) -> PyErr {
    match error {
        AttentionError::Problem(error) => argument(error),
        AttentionError::Driver(error) => device(error),
        error => unsupported(error),
    }
}

/// An instance of a class of `flashcore_attn`, whose callers catch these classes.
fn exception(class: &str, message: &str) -> PyErr {
    Python::attach(|py| {
        let instance =
            py.import("flashcore_attn").and_then(|module| module.getattr(class)?.call1((message,)));
        instance.map_or_else(|error| error, PyErr::from_value)
    })
}
