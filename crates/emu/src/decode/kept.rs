//! The programs that a thread decoded last. A check runs a kernel many times, and a program's kernels in
//! turn.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;

use ptx::{Kernel, Verified};

use super::{Program, decode};
use crate::EmuError;
use crate::report::{Options, Placement};

/// The most programs that a thread keeps.
const MOST: usize = 4;

/// All on which a decoded program depends. A module cannot change, and the key keeps it alive, so that its
/// address tells it from others.
struct Key {
    module: Verified,
    entry: String,
    buffers: usize,
    dynamic_shared: u32,
    placement: Placement,
    cooperative: bool,
    follow_loads: bool,
}

impl Key {
    fn is_of(&self, kernel: &Kernel, options: &Options, follow_loads: bool) -> bool {
        std::ptr::eq(&*self.module, &*kernel.module)
            && self.entry == kernel.entry
            && self.buffers == kernel.buffers.len()
            && self.dynamic_shared == kernel.launch.dynamic_shared
            && self.placement == options.placement
            && self.cooperative == options.cooperative
            && self.follow_loads == follow_loads
    }
}

thread_local! {
    /// The last ones, the latest at the end.
    static LAST: RefCell<VecDeque<(Key, Rc<Program>)>> = const { RefCell::new(VecDeque::new()) };
}

/// The kernel's program, as [`decode`] makes it.
pub(crate) fn decoded(
    kernel: &Kernel,
    options: &Options,
    follow_loads: bool,
) -> Result<Rc<Program>, EmuError> {
    let is_wanted = |(key, _): &&(Key, Rc<Program>)| key.is_of(kernel, options, follow_loads);
    if let Some(known) = LAST.with_borrow(|last| last.iter().find(is_wanted).map(|(_, known)| known.clone()))
    {
        return Ok(known);
    }
    let program = Rc::new(decode(kernel, options, follow_loads)?);
    let key = Key {
        module: kernel.module.clone(),
        entry: kernel.entry.clone(),
        buffers: kernel.buffers.len(),
        dynamic_shared: kernel.launch.dynamic_shared,
        placement: options.placement,
        cooperative: options.cooperative,
        follow_loads,
    };
    LAST.with_borrow_mut(|last| {
        if last.len() == MOST {
            last.pop_front();
        }
        last.push_back((key, program.clone()));
    });
    Ok(program)
}

#[cfg(test)]
mod tests {
    use ptx::{Dim3, Launch};

    use super::*;

    fn kernel() -> Kernel {
        let text = ".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry k()\n{\n    ret;\n}\n";
        Kernel {
            module: ptx::parse(text).unwrap().verify().unwrap(),
            entry: "k".to_owned(),
            launch: Launch::new(Dim3(1, 1, 1), Dim3(32, 1, 1)),
            tensor_maps: Vec::new(),
            args: Vec::new(),
            buffers: Vec::new(),
        }
    }

    #[test]
    fn a_kernel_is_decoded_once_and_others_are_not_mixed_up() {
        let (own, options) = (kernel(), Options::default());
        let of = |kernel: &Kernel, options: &Options| decoded(kernel, options, false).unwrap();
        let first = of(&own, &options);
        assert!(Rc::ptr_eq(&first, &of(&own.clone(), &options)));
        let mut larger = own.clone();
        larger.launch.dynamic_shared = 64;
        let declared = Options { placement: Placement::Declared, ..options.clone() };
        let cooperative = Options { cooperative: true, ..options.clone() };
        // An equal module of another origin is another module.
        let others = [(&kernel(), &options), (&larger, &options), (&own, &declared), (&own, &cooperative)];
        for (kernel, options) in others {
            assert!(!Rc::ptr_eq(&first, &of(kernel, options)));
        }
        // The oldest has made room.
        assert!(!Rc::ptr_eq(&first, &of(&own, &options)));
    }
}
