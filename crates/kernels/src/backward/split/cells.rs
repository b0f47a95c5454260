//! The gradient of a table in float32 to which kernels add by atomics: the kernel that sets it to 0 before,
//! and the kernel that stores it after them.

use problem::{Operand, Problem};
use ptx::{Access, Builder, CmpOp, Dim3, F32, Launch, SpecialReg, Target};

use crate::contract::Contract;
use crate::draft::Draft;

/// Threads of a CTA.
const THREADS: u32 = 256;

/// The temporary of a table's gradient.
pub(super) struct Cells {
    table: u8,
    /// The name of the temporary.
    pub name: &'static str,
    pub extents: Vec<usize>,
}

impl Cells {
    pub fn of(problem: &Problem, table: u8, name: &'static str) -> Cells {
        let extents = problem.programs.tables[usize::from(table)].gradient().extents;
        Cells { table, name, extents }
    }

    pub fn elements(&self) -> usize {
        self.extents.iter().product()
    }

    pub fn bytes(&self) -> usize {
        4 * self.elements().max(1)
    }

    /// The distances of elements in each dimension.
    pub fn strides(&self) -> Vec<i64> {
        let inner = |i: usize| self.extents[i + 1..].iter().product::<usize>() as i64;
        (0..self.extents.len()).map(inner).collect()
    }

    /// The kernel that sets the temporary to 0.
    pub fn draft_clear<'a>(&self, problem: &Problem, target: Target) -> Draft<'a> {
        self.draft(problem, target, "clear")
    }

    /// The kernel that copies the temporary to the gradient.
    pub fn draft_store<'a>(&self, problem: &Problem, target: Target) -> Draft<'a> {
        self.draft(problem, target, "store")
    }

    fn draft<'a>(&self, problem: &Problem, target: Target, what: &str) -> Draft<'a> {
        let stores = what == "store";
        let entry = format!("flash_backward_dtable_{}_{what}", self.table);
        let mut k = Builder::kernel(&entry);
        k.max_threads(THREADS);
        let mut c = Contract::new(problem);
        let access = if stores { Access::Read } else { Access::Write };
        let cells = c.temporary(&mut k, self.name, self.bytes(), access);
        let gradient = if stores { c.operand(&mut k, Operand::DTable(self.table)) } else { None };
        let elements = c.u32(&mut k, "elements", self.elements() as u32);
        let ctas = self.elements().div_ceil(THREADS as usize).max(1) as u32;
        let launch = Launch::new(Dim3(ctas, 1, 1), Dim3(THREADS, 1, 1));
        let body = move |k: &mut Builder| {
            let (thread, cta) = (k.special(SpecialReg::TidX), k.special(SpecialReg::CtaidX));
            let element = k.mad(cta, THREADS, thread);
            let beyond = k.setp_u(CmpOp::Ge, element, elements);
            k.exit_if(beyond);
            let cell = k.index(cells, element, 4);
            match gradient {
                None => {
                    let zero: F32 = k.mov(0.0);
                    k.st(cell, zero);
                }
                Some(gradient) => {
                    let sum: F32 = k.ld(cell);
                    let to = k.index(gradient, element, 4);
                    k.st(to, sum);
                }
            }
        };
        Draft::new(k, c, (&entry, launch), target, body)
    }
}
