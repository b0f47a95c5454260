//! `flashcore._flashcore`: what the Python package needs from Rust. It takes addresses, shapes and strides that the
//! package has read from the caller's tensors, so it neither links nor imports NumPy or PyTorch.
//!
//! The functions here are the package's own: Python code outside of it goes through `flashcore`, which checks that an
//! address belongs to a tensor that is alive.

mod bench;
mod device;
mod error;
mod evolve;
mod host;
mod interrupt;
mod model;
mod openmp;
mod tensor;

use pyo3::prelude::*;

#[pymodule]
fn _flashcore(module: &Bound<'_, PyModule>) -> PyResult<()> {
    // Children made by `fork` see from the answer that they have a parent.
    openmp::is_forked();
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_function(wrap_pyfunction!(host::attention_cpu, module)?)?;
    module.add_function(wrap_pyfunction!(host::describe_cpu, module)?)?;
    module.add_function(wrap_pyfunction!(device::enqueue, module)?)?;
    module.add_function(wrap_pyfunction!(device::explain, module)?)?;
    module.add_function(wrap_pyfunction!(device::describe_gpus, module)?)?;
    module.add_function(wrap_pyfunction!(device::check_gpu, module)?)?;
    module.add_function(wrap_pyfunction!(device::cache_folder, module)?)?;
    module.add_function(wrap_pyfunction!(bench::bench_suites, module)?)?;
    module.add_function(wrap_pyfunction!(evolve::check_problems, module)?)?;
    module.add_function(wrap_pyfunction!(evolve::evaluate, module)?)?;
    module.add_function(wrap_pyfunction!(evolve::lost, module)?)?;
    module.add_function(wrap_pyfunction!(evolve::describe_card, module)?)?;
    module.add_function(wrap_pyfunction!(evolve::ledger_check, module)?)?;
    module.add_class::<evolve::Evolution>()?;
    module.add_function(wrap_pyfunction!(model::model_problems, module)?)?;
    module.add_class::<model::CpuSession>()?;
    module.add_class::<bench::Session>()?;
    module.add_class::<bench::Race>()?;
    Ok(())
}
