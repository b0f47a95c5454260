//! Kernels loaded on the device. No kernel is ever unloaded: a captured graph may refer to it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use driver::{Context, DriverError, Expect, Function};
use kernels::quantize::QuantizationCode;
use kernels::{Baked, KernelError, Plan, Program};

use super::scratch::Scratch;
use crate::AttentionError;

/// The key of loading and admission: what the code depends on, and which resources the kernels
/// may use. Problems that differ in other values have the same key and launch the same kernels.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Key {
    pub code: Code,
    pub first: Expect,
    pub then: Vec<Expect>,
}

/// The properties on which the code of kernels depends.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Code {
    Attention(Box<(Baked, Plan)>),
    Quantization(QuantizationCode),
}

/// The loaded kernels of a program, which passed admission.
#[derive(Debug)]
pub(super) struct Functions {
    pub first: Function,
    pub then: Vec<Function>,
}

/// The loaded kernels of a device, and the kernels whose loading failed for good.
#[derive(Debug, Default)]
pub(super) struct Kernels {
    all: Mutex<HashMap<Key, Result<Arc<Functions>, DriverError>>>,
    pub scratch: Scratch,
}

impl Kernels {
    /// The loaded kernels. The first call for a key emits the program and loads it.
    pub(super) fn load(
        &self,
        context: &Arc<Context>,
        key: Key,
        emit: impl FnOnce() -> Result<Program, KernelError>,
    ) -> Result<Arc<Functions>, AttentionError> {
        let known = self.all.lock().unwrap_or_else(PoisonError::into_inner).get(&key).cloned();
        if let Some(known) = known {
            return Ok(known?);
        }
        let made = Functions::load(context, &key, &emit()?).map(Arc::new);
        if made.as_ref().is_err_and(may_pass) {
            return Ok(made?);
        }
        // Two threads may load the same kernels at once; the first result stays.
        let mut all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(all.entry(key).or_insert(made).clone()?)
    }
}

impl Functions {
    /// Loads the kernels of a program, which are entries of one module.
    fn load(context: &Arc<Context>, key: &Key, program: &Program) -> Result<Functions, DriverError> {
        let first = [(&program.kernel, &key.first)];
        let mut all =
            Function::load_all(context, first.into_iter().chain(program.then.iter().zip(&key.then)))?;
        let then = all.split_off(1);
        Ok(Functions { first: all.remove(0), then })
    }
}

/// Whether loading the same kernel again may succeed.
fn may_pass(error: &DriverError) -> bool {
    !matches!(error, DriverError::Admission { .. } | DriverError::Compile { .. })
}
