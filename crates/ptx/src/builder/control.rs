//! Structured control flow: branches and loops.

use super::{Builder, Pred, R32, Src};
use crate::{CmpOp, Guard, Label, Op, Operand, Statement};

impl Builder {
    fn branch(&mut self, guard: Option<Guard>, label: Label) {
        let outer = std::mem::replace(&mut self.guard, guard);
        self.op(Op::Bra { uni: false }, [Operand::Label(label)]);
        self.guard = outer;
    }

    /// Emits `body` with `guard` on every instruction, without a branch. An instruction has one guard, so an
    /// inner `guarded` replaces the outer guard.
    pub fn guarded<R>(&mut self, guard: impl Into<Guard>, body: impl FnOnce(&mut Builder) -> R) -> R {
        let outer = self.guard.replace(guard.into());
        let result = body(self);
        self.guard = outer;
        result
    }

    /// `if guard { body }`, as a branch over the body.
    pub fn if_(&mut self, guard: impl Into<Guard>, body: impl FnOnce(&mut Builder)) {
        let end = self.fresh_label("endif");
        self.branch(Some(!guard.into()), end);
        body(self);
        self.place(end);
    }

    /// `if guard { then } else { otherwise }`.
    pub fn if_else(
        &mut self,
        guard: impl Into<Guard>,
        then: impl FnOnce(&mut Builder),
        otherwise: impl FnOnce(&mut Builder),
    ) {
        let (other, end) = (self.fresh_label("else"), self.fresh_label("endif"));
        self.branch(Some(!guard.into()), other);
        then(self);
        self.branch(None, end);
        self.place(other);
        otherwise(self);
        self.place(end);
    }

    /// `while condition { body }`.
    pub fn while_(&mut self, condition: impl FnOnce(&mut Builder) -> Pred, body: impl FnOnce(&mut Builder)) {
        let (top, end) = (self.fresh_label("while"), self.fresh_label("endwhile"));
        self.place(top);
        let go = condition(self);
        self.branch(Some(!go), end);
        body(self);
        self.branch(None, top);
        self.place(end);
    }

    /// `do { body } while condition`: `body` returns the condition.
    pub fn do_while<G: Into<Guard>>(&mut self, body: impl FnOnce(&mut Builder) -> G) {
        let top = self.fresh_label("do");
        self.place(top);
        let go = body(self).into();
        self.branch(Some(go), top);
    }

    /// `for i in (start..end).step_by(step) { body }`, signed. The condition is tested before the first
    /// iteration and at the end of each iteration.
    pub fn for_range(
        &mut self,
        start: impl Into<Src<R32>>,
        end: impl Into<Src<R32>>,
        step: impl Into<Src<R32>>,
        body: impl FnOnce(&mut Builder, R32),
    ) {
        let (top, done) = (self.fresh_label("for"), self.fresh_label("endfor"));
        let (end, step): (Src<R32>, Src<R32>) = (end.into(), step.into());
        let i: R32 = self.mov(start);
        let none = self.setp_s(CmpOp::Ge, i, end.clone());
        self.branch(Some(none.into()), done);
        self.place(top);
        body(self, i);
        self.add_to(i, i, step);
        let more = self.setp_s(CmpOp::Lt, i, end);
        self.branch(Some(more.into()), top);
        self.place(done);
    }

    /// Asks ptxas not to unroll the loop whose body begins here (PTX ISA, "Pragma Strings: nounroll").
    pub fn nounroll(&mut self) {
        self.body.statements.push(Statement::Pragma("nounroll".into()));
    }

    /// Exits the thread if `guard` is true.
    pub fn exit_if(&mut self, guard: impl Into<Guard>) {
        self.guarded(guard, |k| k.op(Op::Exit, []));
    }
}
