//! Attention on an NVIDIA GPU.
//!
//! A [`Gpu`] turns a problem into a [`Prepared`] kernel once: it picks a plan and computes the arguments of
//! the launch. If no kernel for the plan and the problem's [`kernels::Baked`] is loaded, it emits PTX,
//! compiles the PTX or takes the machine code from the disk cache, and compares the compiled kernel's
//! resources with the plan. [`Prepared::enqueue`] then only launches: it does not wait or allocate, and it
//! may be captured in a graph.

mod arrays;
mod candidates;
mod host;
mod launches;
mod loaded;
mod prepared;
mod quantizer;
mod scratch;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};

use kernels::{Arch, Plan};
use problem::Problem;

use crate::AttentionError;
use crate::known::{Key, Known, Wish};
pub(crate) use arrays::{ArrayKernel, ArrayWork, Written};
pub use candidates::PlanSource;
pub use driver::{
    Buffer, Context, DeviceInfo, DeviceSlice, DriverError, Event, Graph, GraphExec, Pinned, Pool, PoolBuffer,
    Resources, Stream, Transfer,
};
pub(crate) use host::{attend, bytes_mut};

pub use prepared::{Fallback, Prepared};
pub use problem::{LengthArray, Operand};
pub use quantizer::Quantizer;

/// Bytes of freed device memory that the pool keeps for the next call on host slices.
const KEEP: u64 = 1 << 30;

/// The oldest architecture that the kernels run on.
pub(crate) const OLDEST_SM: u32 = 80;

/// A device that computes attention. There is one [`Gpu`] per process and ordinal; any thread may use it.
pub struct Gpu {
    context: Arc<Context>,
    arch: Arch,
    pool: OnceLock<Pool>,
    /// Idle streams of calls on host slices.
    streams: Mutex<Vec<Stream>>,
    kernels: Arc<loaded::Kernels>,
    prepared: RwLock<Known<Arc<Prepared>>>,
    array_kernels: RwLock<Known<Arc<ArrayKernel>, ArrayWork>>,
}

impl Gpu {
    /// The device with this ordinal of the CUDA driver; 0 is the first. Each call returns the same [`Gpu`].
    ///
    /// # Errors
    /// When the driver or the device does not exist, or when the device is older than sm_80.
    pub fn open(ordinal: i32) -> Result<Arc<Gpu>, AttentionError> {
        static OPEN: Mutex<BTreeMap<i32, Arc<Gpu>>> = Mutex::new(BTreeMap::new());
        // This check precedes the lock: in a forked process, a thread that no longer exists may hold it.
        driver::process::check()?;
        let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(gpu) = open.get(&ordinal) {
            return Ok(gpu.clone());
        }
        let context = Context::open(ordinal)?;
        let arch = arch_of(context.info())?;
        let gpu = Gpu {
            context,
            arch,
            pool: OnceLock::new(),
            streams: Mutex::default(),
            kernels: Arc::default(),
            prepared: RwLock::default(),
            array_kernels: RwLock::default(),
        };
        let gpu = Arc::new(gpu);
        open.insert(ordinal, gpu.clone());
        Ok(gpu)
    }

    /// Properties of the device.
    pub fn info(&self) -> &DeviceInfo {
        self.context.info()
    }

    /// The device's CUDA context, for streams, graphs and memory.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// The architecture that kernels are generated for, with the device's sizes.
    pub fn arch(&self) -> &Arch {
        &self.arch
    }

    /// A kernel for the problem, ready to launch. A `plan` that is given is used alone. Otherwise the best
    /// known plan is used that passes its admission test on this device; [`Prepared::fallbacks`] lists those
    /// that did not. The kernel returns the LSE exactly if the problem's pass asks for it. The call is
    /// allowed while a stream is captured.
    ///
    /// A call is slow only if no kernel with the same [`kernels::Baked`] and plan is loaded yet: it emits the
    /// kernel, compiles it and loads it. Another sequence length, for example, usually needs the loaded
    /// kernel and other arguments. At most 1024 problems stay prepared. Loaded kernels stay until the process
    /// ends.
    ///
    /// A problem without rows (for example an empty batch) is accepted and does nothing. A problem without
    /// keys gives O = 0 and LSE = −∞.
    ///
    /// # Errors
    /// When the problem is not valid, when no kernel family supports it (the message names what is accepted),
    /// or when the driver fails.
    pub fn prepare(&self, problem: &Problem, plan: Option<&Plan>) -> Result<Arc<Prepared>, AttentionError> {
        let wish = plan.map_or(Wish::Best, |plan| Wish::Given(Box::new(plan.clone())));
        self.prepared(Key { problem: problem.clone(), wish })
    }

    /// The value under a key, prepared now if the key is new.
    pub(crate) fn prepared(&self, key: Key) -> Result<Arc<Prepared>, AttentionError> {
        // This check precedes the lock: in a forked process, a thread that no longer exists may hold it.
        driver::process::check()?;
        let known = self.prepared.read().unwrap_or_else(PoisonError::into_inner).get(&key);
        if let Some(prepared) = known {
            return Ok(prepared);
        }
        let plan = match &key.wish {
            Wish::Given(plan) => Some(&**plan),
            Wish::Best | Wish::Threads(_) => None,
        };
        // Two threads may prepare the same problem at once; the first result stays.
        let prepared = Arc::new(Prepared::new(&self.context, &self.kernels, &self.arch, &key.problem, plan)?);
        Ok(self.prepared.write().unwrap_or_else(PoisonError::into_inner).keep(key, prepared))
    }

    /// Frees device memory of earlier calls that no call, stream or graph holds any more. The first four
    /// streams keep their scratch, also after they are destroyed.
    ///
    /// # Errors
    /// When the driver fails.
    pub fn trim(&self) -> Result<(), AttentionError> {
        self.kernels.scratch.trim()?;
        if let Some(pool) = self.pool.get() {
            pool.trim(0)?;
        }
        Ok(())
    }

    fn pool(&self) -> Result<&Pool, AttentionError> {
        if let Some(pool) = self.pool.get() {
            return Ok(pool);
        }
        let pool = Pool::new(&self.context, KEEP)?;
        Ok(self.pool.get_or_init(|| pool))
    }

    /// Runs `work` on an idle stream of this [`Gpu`] and makes the stream idle again. Reusing streams bounds
    /// the scratch memory, which is kept per stream.
    fn on_stream<T>(
        &self,
        work: impl FnOnce(&Stream) -> Result<T, AttentionError>,
    ) -> Result<T, AttentionError> {
        let idle = || self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        let known = idle().pop();
        let stream = known.map_or_else(|| Stream::new(&self.context), Ok)?;
        let result = work(&stream);
        idle().push(stream);
        result
    }
}

impl fmt::Debug for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Gpu({:?}, sm_{})", self.context, self.arch.sm)
    }
}

/// The architecture that kernels are emitted for, with the device's own sizes: the device's own version if it
/// is known, else the newest known version that is older. 9.0 is left out for other devices, because its
/// kernels are compiled for `sm_90a`, which runs on 9.0 alone.
fn arch_of(info: &DeviceInfo) -> Result<Arch, AttentionError> {
    let runs = |sm: &u32| *sm == info.sm() || *sm < info.sm() && *sm != Arch::SM_90.sm;
    let sm = Arch::ALL.iter().map(|arch| arch.sm).filter(runs).max();
    let sm = sm.ok_or_else(|| AttentionError::Unsupported {
        argument: "device",
        value: format!("{} (sm_{})", info.name, info.sm()),
        accepted: "a GPU of sm_80 (A100, RTX 30) and later, or the CPU".to_owned(),
    })?;
    Ok(Arch {
        sm,
        multiprocessors: info.sms,
        shared_per_cta: info.shared_per_cta,
        shared_per_sm: info.shared_per_sm,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(sm: (u32, u32)) -> DeviceInfo {
        DeviceInfo {
            ordinal: 0,
            name: "Test".to_owned(),
            uuid: String::new(),
            capability: sm,
            sms: 66,
            memory: 1 << 30,
            l2: 1 << 20,
            shared_per_cta: 99 << 10,
            shared_per_sm: 100 << 10,
            pools: true,
            driver: 13000,
            driver_build: None,
        }
    }

    #[test]
    fn a_device_gets_the_newest_architecture_that_runs_on_it() {
        for (capability, sm) in
            [((8, 0), 80), ((8, 7), 86), ((8, 9), 89), ((9, 0), 90), ((10, 3), 89), ((12, 1), 120)]
        {
            let arch = arch_of(&device(capability)).unwrap();
            assert_eq!((arch.sm, arch.multiprocessors), (sm, 66));
        }
        let error = arch_of(&device((7, 5))).unwrap_err().to_string();
        assert!(error.contains("Test (sm_75)") && error.contains("sm_80"), "{error}");
    }
}
