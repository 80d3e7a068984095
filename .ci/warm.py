"""Kernels that start at once: forks of one process that has imported what nearly every notebook imports (never moe_lab, never triton).

`start` stands in for jupyter_client's `launch_kernel`: the same process in the end, without two seconds of imports for each of 130 notebooks.
"""
import atexit, functools, json, os, signal, subprocess, sys


class Kernel:
    "A forked kernel, with what jupyter_client asks of a Popen."
    stdin = stdout = stderr = None

    def __init__(self, pid): self.pid = pid

    def poll(self):
        try: os.kill(self.pid, 0)
        except ProcessLookupError: return 0

    def wait(self): return 0     # asked when `poll` has seen its end

    def send_signal(self, signum): os.kill(self.pid, signum)

    def kill(self): self.send_signal(signal.SIGKILL)

    def terminate(self): self.send_signal(signal.SIGTERM)


@functools.cache
def nursery(owner):
    "The process that kernels are forked from. tqdm reads its variable when it is imported, which torch does: no stored output may depend on the clock."
    return subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True, env=os.environ | {"TQDM_DISABLE": "1"})


def start(cmd, env, cwd, **_):
    "A kernel as `cmd` would start it."
    n = nursery(os.getpid())
    n.stdin.write(json.dumps([cmd[cmd.index("-m") + 1:], env, cwd and os.path.abspath(cwd)]) + "\n"); n.stdin.flush()
    if not (pid := n.stdout.readline()): raise RuntimeError("the process that kernels are forked from has ended")
    return Kernel(int(pid))


def serve():
    "A line in: module and arguments, environment and folder of a kernel. A line out: its pid. In the kernel it returns; it ends with whoever started it."
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)                # the system buries them
    for line in sys.stdin:
        if os.fork(): continue
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        argv, env, cwd = json.loads(line)
        os.environ.clear(); os.environ.update(env)
        if cwd: os.chdir(cwd)
        os.write(1, f"{os.getpid()}\n".encode())
        os.dup2(os.open(os.devnull, os.O_RDWR), 0); os.dup2(2, 1)
        sys.argv = [*argv, f"--IPKernelApp.parent_handle={os.getppid()}"]      # ends with its parent
        return
    sys.exit()


if __name__ == "__main__":
    del sys.path[0]                                              # this folder
    import fastcore.test, plotly.graph_objects, plotly.io, torch  # noqa: F401, E401
    from ipykernel.kernelapp import IPKernelApp
    serve()
    IPKernelApp.launch_instance()
    app = IPKernelApp.instance()
    for end in (app.close, app.iopub_thread.stop): atexit.unregister(end)      # they wait for threads that may wait for them
    atexit._run_exitfuncs()
    os._exit(0)                                                  # without taking torch apart for half a second
