"""Waits below Python: C and C++ calls, the source line that made the call, the kernel function.

Python frames end where C begins. A native pass shows the C calls; where there is none, the source
line names the call, and `/proc/PID/wchan` names the kernel function in which the main thread
sleeps.
"""

import re

from hangdoctor.patterns import Pattern

# fmt: off
NATIVE = (
    Pattern("p2p", "recv", r"c10d::ProcessGroupGloo::RecvWork::wait|.*RecvWork.*", r".*"),
    Pattern("p2p", "send", r"c10d::ProcessGroupGloo::SendWork::wait|.*SendWork.*", r".*"),
    Pattern(
        "collective", "work.wait",
        r"c10d::Work::wait|c10d::(ops|ProcessGroup)[^(]*::(wait|synchronize).*|.*WorkNCCL::.*|"
        r"gloo::(?!transport|rendezvous).*|ncclGroupEnd.*|ncclAllReduce.*",
        r".*",
    ),
    Pattern(
        "store", "store",
        r"c10d::(TCPStore|FileStore|PrefixStore|HashStore|detail::TCPClient|.*Store::).*|gloo::rendezvous.*|"
        r"ncclCommInitRank.*|bootstrapInit.*",
        r".*",
    ),
    Pattern(
        "device", "device sync",
        r"(cuda|cu|hip)(Stream|Device|Event|Ctx)Synchronize.*|cudaMemcpy.*|cuMemcpy.*|"
        r"at::native::_local_scalar_dense.*|at::native::item.*",
        r".*",
    ),
    Pattern("backward", "backward", r"torch::autograd::Engine::.*", r".*"),
    Pattern("gil", "GIL", r"take_gil|PyEval_AcquireThread|PyEval_RestoreThread", r".*"),
    Pattern(
        "lock", "lock",
        r"(lock|rlock)_(PyThread_)?acquire.*|.*acquire_timed|PyMutex_Lock.*|_PyMutex.*",
        r".*",
    ),
    Pattern("file_lock", "file lock", r"flock|fcntl_flock.*|fcntl_lockf.*|lockf", r".*"),
    Pattern("sleep", "sleep", r"clock_nanosleep|time_sleep|nanosleep|pysleep", r".*"),
    Pattern("subprocess", "waitpid", r"wait4|waitpid|waitid|os_waitpid.*", r".*"),
    Pattern("prompt", "input", r"builtin_input.*|PyOS_Readline|readline.*", r".*"),
    Pattern(
        "socket", "socket",
        r"sock_recv.*|sock_accept.*|sock_connect.*|recv|recvfrom|accept4?|connect|SSL_read.*|__libc_recv|"
        r"__poll|poll|epoll_wait|select",
        r".*",
    ),
    Pattern(
        "file", "file",
        r"os_read.*|os_fsync.*|fsync|fdatasync|_io_FileIO_(read|write).*|os_write.*",
        r".*",
    ),
)
# A call into C leaves no Python frame: the text of the source line names the call that sleeps.
SOURCE = (
    ("destroy", "destroy_process_group", r"\b(destroy_process_group|_abort_process_group)\("),
    ("sleep", "sleep", r"\bsleep\("),
    ("file_lock", "file lock", r"\b(flock|lockf)\("),
    ("lock", "lock", r"\bwith\b.*(lock|mutex|semaphore|condition|\bcv\b)|(lock|mutex|sem\w*)\.acquire\(|\.acquire\("),
    ("prompt", "input", r"\binput\(|breakpoint\(|set_trace\("),
    ("subprocess", "waitpid", r"\bos\.(system|wait\w*)\("),
    ("collective", "work.wait", r"\b\w*(work|handle|req|request|pending|future|fut|op|w|h|works?\[\w+\])\.wait\("),
    ("store", "store", r"\bstore\.\w+\(|TCPStore\("),
    ("socket", "socket", r"\.(recv\w*|accept|connect)\(|getaddrinfo\("),
    ("device", "device sync", r"\.(item|cpu|tolist|numpy|synchronize)\(|\bsynchronize\("),
    ("file", "file", r"\bopen\(|\.(open|read\w*|write\w*|readline\w*)\(|\bos\.(read|write|fsync)\("),
)
POSTED = re.compile(
    r"\b(i?recv|i?send|batch_isend_irecv)\b|\b(all_reduce|all_gather\w*|reduce_scatter\w*|broadcast|all_to_all\w*|barrier)\b"
)
# Where the stack ends in a line of Python, the kernel still names the call in which the main thread
# sleeps.
WCHAN = (
    ("sleep", r"hrtimer_nanosleep|do_nanosleep|common_nsleep.*"),
    ("subprocess", r"do_wait.*|kernel_wait.*"),
    ("queue", r"(anon_)?pipe_(read|write).*|eventfd_read"),
    (
        "socket",
        r".*poll.*|ep_.*|do_select|core_sys_select|inet_csk_accept|sk_wait_data|wait_woken|unix_stream.*|"
        r"skb_wait.*|tcp_.*",
    ),
    ("prompt", r"n_tty_read|tty_.*"),
    (
        "file",
        r"(nfs|rpc_wait|folio_wait|io_schedule|jbd2|fuse|request_wait|wait_on_page|xfs|ext4|lustre|ll_|cl_|wait_for_partner|fifo_open|pipe_wait).*",
    ),
    ("file_lock", r"(flock_lock|locks_lock|posix_lock).*"),
    ("stopped", r"do_signal_stop|ptrace_stop"),
)
# fmt: on
