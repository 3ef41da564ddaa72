//! Rules that assign blocks to components by functions on their stack, by files, and by what TensorFlow
//! says. The built-in rules are `classes.txt`, whose head says how a rule is written; a user's file goes before
//! them.
use crate::component;

/// The text of the rules that are built in.
pub const BUILT_IN: &str = include_str!("../classes.txt");

/// What a rule looks at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A function on the stack.
    Symbol,
    /// A file on the stack.
    Module,
    /// The operator's name in TensorFlow's annotation.
    Op,
    /// The region in TensorFlow's annotation.
    Region,
}

/// One rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rule<'a> {
    /// The component of blocks that are kept from step to step.
    pub kept: u8,
    /// The component of those that are not: as a rule the same.
    pub passing: u8,
    /// The component is a guess: by whose code it is, not by what that does.
    pub guess: bool,
    /// What the pattern is of.
    pub kind: Kind,
    /// The pattern.
    pub pattern: &'a str,
}

/// A line of a file of rules that is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BadRule<'a> {
    /// Its number in the file, from 1.
    pub line: usize,
    /// What it says.
    pub text: &'a str,
}

/// The rules in force. A rule has an index: the lower one wins.
#[derive(Clone, Copy, Debug)]
pub struct Classes<'a> {
    user: &'a str,
}

impl<'a> Classes<'a> {
    /// The rules of a user's file (which may be empty), then those that are built in.
    ///
    /// # Errors
    /// The first line of the user's file that is neither a rule nor a comment.
    pub fn new(user: &'a str) -> Result<Self, BadRule<'a>> {
        for (i, text) in user.lines().enumerate() {
            if !(is_comment(text) || parse(text).is_some() || is_list(text)) {
                return Err(BadRule { line: i + 1, text });
            }
        }
        Ok(Self { user })
    }

    fn rules(self) -> impl Iterator<Item = Rule<'a>> {
        self.user.lines().chain(BUILT_IN.lines()).filter_map(parse)
    }

    /// The indices of the rules that a frame fulfils: the name of its function, and the path of the file
    /// that it is in.
    pub fn of_frame(self, symbol: &str, module: &str) -> impl Iterator<Item = usize> {
        self.indices(move |rule| match rule.kind {
            Kind::Symbol => matches(rule.pattern, symbol),
            Kind::Module => matches(rule.pattern, module),
            Kind::Op | Kind::Region => false,
        })
    }

    /// The indices of the rules that fit what TensorFlow says: the operator's name and the region. A
    /// block's rule is the lowest of these and those of its frames.
    pub fn of_annotation(self, op: &str, region: &str) -> impl Iterator<Item = usize> {
        self.indices(move |rule| match rule.kind {
            Kind::Op => matches(rule.pattern, op),
            Kind::Region => matches(rule.pattern, region),
            Kind::Symbol | Kind::Module => false,
        })
    }

    /// Whether a function allocates tensors. What TensorFlow says without a region (of all that it does
    /// for an operator) is meant of blocks that come from one.
    #[must_use]
    pub fn allocates_tensors(self, symbol: &str) -> bool {
        self.lists(TENSORS, symbol)
    }

    /// Whether a file is one of a runtime that loads models and runs them, and says nothing of its blocks.
    #[must_use]
    pub fn is_runtime(self, module: &str) -> bool {
        self.lists(RUNTIME, module)
    }

    fn lists(self, list: [&str; 2], name: &str) -> bool {
        let lines = self.user.lines().chain(BUILT_IN.lines());
        lines.filter_map(|line| listed(line, list)).any(|pattern| matches(pattern, name))
    }

    fn indices(self, holds: impl Fn(&Rule<'a>) -> bool) -> impl Iterator<Item = usize> {
        self.rules().enumerate().filter(move |(_, rule)| holds(rule)).map(|(index, _)| index)
    }

    /// The rule of this index.
    #[must_use]
    pub fn rule(self, index: usize) -> Option<Rule<'a>> {
        self.rules().nth(index)
    }
}

fn is_comment(line: &str) -> bool {
    let line = line.trim();
    line.is_empty() || line.starts_with('#')
}

/// Lists, by what their lines begin with: functions that allocate tensors, files of runtimes.
const TENSORS: [&str; 2] = ["tensors", "symbol:"];
const RUNTIME: [&str; 2] = ["runtime", "module:"];

/// The pattern of a line of a list.
fn listed<'a>(line: &'a str, [word, kind]: [&str; 2]) -> Option<&'a str> {
    let rest = line.trim().strip_prefix(word)?.trim_start();
    rest.strip_prefix(kind).filter(|pattern| !pattern.is_empty())
}

fn is_list(line: &str) -> bool {
    [TENSORS, RUNTIME].into_iter().any(|list| listed(line, list).is_some())
}

fn parse(line: &str) -> Option<Rule<'_>> {
    if is_comment(line) {
        return None;
    }
    let (components, rest) = line.trim().split_once(char::is_whitespace)?;
    let (kind, pattern) = rest.trim_start().split_once(':')?;
    let kind = match kind {
        "symbol" => Kind::Symbol,
        "module" => Kind::Module,
        "op" => Kind::Op,
        "region" => Kind::Region,
        _ => return None,
    };
    let (components, guess) =
        components.strip_suffix('?').map_or((components, false), |c| (c, true));
    let (kept, passing) = components.split_once('|').unwrap_or((components, components));
    let find = |name: &str| component::find(name.as_bytes()).filter(|&c| c != component::UNKNOWN);
    let (kept, passing) = (find(kept)?, find(passing)?);
    (!pattern.is_empty()).then_some(Rule { kept, passing, guess, kind, pattern })
}

/// Whether a pattern, in which a `*` stands for any text, is all of `text`.
fn matches(pattern: &str, text: &str) -> bool {
    let Some((first, rest)) = pattern.split_once('*') else { return pattern == text };
    let Some(mut text) = text.strip_prefix(first) else { return false };
    let mut parts = rest.split('*').peekable();
    while let Some(part) = parts.next() {
        if parts.peek().is_none() {
            return text.ends_with(part);
        }
        match text.find(part) {
            Some(at) => text = text.get(at + part.len()..).unwrap_or(""),
            None => return false,
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(classes: Classes<'_>, annotation: (&str, &str), stack: &[(&str, &str)]) -> Rule<'static> {
        let rules = stack.iter().flat_map(|(symbol, module)| classes.of_frame(symbol, module));
        let (op, region) = annotation;
        let said =
            (!op.is_empty()).then(|| classes.of_annotation(op, region)).into_iter().flatten();
        let unknown = Rule { kept: 0, passing: 0, guess: true, kind: Kind::Op, pattern: "" };
        let rule = rules.chain(said).min().and_then(|index| classes.rule(index));
        rule.map_or(unknown, |rule| Rule { pattern: "", ..rule })
    }

    fn names(rule: Rule<'_>) -> [&'static str; 2] {
        [rule.kept, rule.passing].map(|number| component::NAMES[usize::from(number)])
    }

    fn of_stack(classes: Classes<'_>, stack: &[(&str, &str)]) -> &'static str {
        names(of(classes, ("", ""), stack))[1]
    }

    #[test]
    fn every_line_that_is_built_in_is_a_rule() {
        assert!(Classes::new(BUILT_IN).is_ok());
        let lines = BUILT_IN.lines().filter(|line| !is_comment(line)).count();
        let lists = BUILT_IN.lines().filter(|line| is_list(line)).count();
        assert_eq!(Classes::new("").unwrap().rules().count() + lists, lines);
        assert!(lines > 80);
    }

    #[test]
    fn patterns() {
        for (pattern, text) in [
            ("abc", "abc"),
            ("*", ""),
            ("*", "abc"),
            ("a*", "a"),
            ("a*c", "abc"),
            ("*b*", "abc"),
            ("a*b*c", "a-b-b-c"),
            ("a*bc", "abcbc"),
            ("a**c", "ac"),
        ] {
            assert!(matches(pattern, text), "{pattern} {text}");
        }
        for (pattern, text) in [
            ("abc", "abcd"),
            ("a*", "ba"),
            ("a*a", "a"),
            ("*b", "abc"),
            ("a*b*c", "acb"),
            ("", "a"),
        ] {
            assert!(!matches(pattern, text), "{pattern} {text}");
        }
    }

    #[test]
    fn stacks_of_frameworks() {
        let classes = Classes::new("").unwrap();
        let tf = "/x/libtensorflow_cc.so.2";
        let python = ("_PyEval_EvalFrameDefault", "/usr/bin/python3.11");
        let kernel = ("tensorflow::MatMulOp<float>::Compute(tensorflow::OpKernelContext*)", tf);
        let stacks: [(&str, &[(&str, &str)]); 7] = [
            ("workspace", &[("dnnl::impl::malloc(unsigned long, int)", tf), kernel, python]),
            (
                "workspace",
                &[
                    (
                        "Eigen::internal::TensorContractionBlockMemAllocator<float, float>::allocate<Eigen::ThreadPoolDevice>()",
                        tf,
                    ),
                    kernel,
                ],
            ),
            (
                "activations",
                &[("tsl::CPUAllocator::AllocateRaw(unsigned long)", tf), kernel, python],
            ),
            ("framework", &[("google::protobuf::Arena::Allocate", tf), kernel, python]),
            ("python", &[("_PyObject_Malloc", "/usr/bin/python3.11"), python]),
            ("other", &[("_dl_map_object", "/lib64/ld-linux-x86-64.so.2")]),
            ("unknown", &[("main", "/usr/bin/redis-server")]),
        ];
        for (component, stack) in stacks {
            assert_eq!(of_stack(classes, stack), component, "{stack:?}");
        }
    }

    const TF: &str = "/x/libtensorflow_cc.so.2";
    const ALLOCATE: (&str, &str) = ("tensorflow::OpKernelContext::allocate_output(int)", TF);
    const PACKING: (&str, &str) =
        ("Eigen::internal::TensorContractionBlockMemAllocator<float, float>::allocate()", TF);
    const UPDATE: (&str, &str) =
        ("tensorflow::Status tensorflow::PrepareToUpdateVariable<Device, float>(Tensor*)", TF);

    #[test]
    fn what_tensorflow_says() {
        let classes = Classes::new("").unwrap();
        for (op, region, stack, expected) in [
            ("functional_1/conv_b_1/Relu", "output", &[ALLOCATE][..], ["weights", "activations"]),
            ("functional_1/conv_b_1/Conv2D", "temp", &[ALLOCATE], ["workspace"; 2]),
            ("functional_1/conv_b_1/Conv2D", "", &[PACKING], ["workspace"; 2]),
            ("gradient_tape/functional_1/Conv2DBackpropFilter", "output", &[], ["gradients"; 2]),
            ("gradient_tape/functional_1/Sum_1", "temp", &[], ["gradients"; 2]),
            ("x/adam/Square_8", "output", &[], ["optimizer", "workspace"]),
            ("x/adam/AssignAddVariableOp_3", "temp", &[UPDATE], ["optimizer"; 2]),
            ("x/adam/AssignSubVariableOp_3", "temp", &[UPDATE], ["weights"; 2]),
            ("adam/dense_kernel_momentum/Initializer/zeros", "", &[], ["optimizer"; 2]),
            ("sgd/AssignVariableOp", "temp", &[UPDATE], ["optimizer"; 2]),
            ("AssignSubVariableOp", "temp", &[UPDATE], ["weights"; 2]),
            ("model/madam/Relu", "output", &[], ["weights", "activations"]),
            ("checkpoint/RestoreV2", "output", &[], ["weights"; 2]),
        ] {
            assert_eq!(names(of(classes, (op, region), stack)), expected, "{op} {region}");
        }
        // The copy of a variable, made by an operator that only reads it.
        let copy = ("tensorflow::EnsureSparseVariableAccess<Device, float>(Var*)", TF);
        assert_eq!(names(of(classes, ("Gather", "temp"), &[copy])), ["weights"; 2]);
    }

    #[test]
    fn a_guess_is_called_one() {
        let classes = Classes::new("").unwrap();
        assert!(classes.allocates_tensors("tsl::(anonymous namespace)::CPUAllocator::AllocateRaw"));
        assert!(!classes.allocates_tensors("tsl::port::AlignedMalloc"));
        let guess = |stack| of(classes, ("", ""), stack).guess;
        for runtime in [
            "/v/onnxruntime/capi/onnxruntime_pybind11_state.cpython-311-x86_64-linux-gnu.so",
            "/usr/lib/libonnxruntime.so.1.32.0",
            "/v/openvino/libs/libopenvino_intel_cpu_plugin.so",
            "/v/openvino/_pyopenvino.cpython-311-x86_64-linux-gnu.so",
        ] {
            let rule = of(classes, ("", ""), &[("f", runtime)]);
            assert!(classes.is_runtime(runtime) && rule.guess, "{runtime}");
        }
        assert!(!classes.is_runtime(TF));
        assert!(Classes::new("runtime module:/m*").unwrap().is_runtime("/mine.so"));
        assert!(!guess(&[("tensorflow::OpRegistry::Register()", TF)]));
        assert!(guess(&[("tensorflow::Nothing::Known()", TF)]));
        assert!(guess(&[("f", TF)]));
    }

    #[test]
    fn a_users_rules_go_first_and_bad_ones_are_named() {
        let classes =
            Classes::new("# mine\n\nkv_cache  symbol:serve::*\nworkspace op:mine*\n").unwrap();
        let stack = [("malloc", "libc"), ("serve::Cache::grow", "/bin/serve"), ("dnnl_x", "")];
        assert_eq!(of_stack(classes, &stack), "kv_cache");
        assert_eq!(names(of(classes, ("mine/x", "output"), &[])), ["workspace"; 2]);
        let both = Classes::new("weights|loader? module:/a").unwrap();
        let rule = of(both, ("", ""), &[("f", "/a")]);
        assert_eq!((names(rule), rule.guess), (["weights", "loader"], true));
        for (text, line) in [
            ("weights| symbol:a", 1),
            ("weights|nothing symbol:a", 1),
            ("weights symbol:a\nnothing symbol:b", 2),
            ("weights", 1),
            ("weights a*", 1),
            ("weights file:a", 1),
            ("runtime symbol:a", 1),
            ("weights symbol:", 1),
            ("unknown symbol:a", 1),
        ] {
            assert_eq!(Classes::new(text).unwrap_err().line, line, "{text}");
        }
    }
}
