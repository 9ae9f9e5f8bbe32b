// Says the signal and the last calls to CUDA when a process crashes in C, unless another handler is installed, as
// Python's faulthandler.
#include "virtual_gpu.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MAX_UNWRITTEN 8
static const char* last_call = "none";
static const char* unwritten[MAX_UNWRITTEN];  // functions that were called and have no effect here

void virtual_gpu_called(const char* name) { last_call = name; }

int virtual_gpu_without_effect(const char* name) {
  last_call = name;
  for (int i = 0; i < MAX_UNWRITTEN; i++) {  // several threads may come here at once
    const char* there = __sync_val_compare_and_swap(&unwritten[i], NULL, name);
    if (there == name) return 0;
    if (!there) break;
  }
  if (getenv("VIRTUAL_GPU_VERBOSE")) fprintf(stderr, "virtual GPU: %s has no effect\n", name);
  return 0;
}

static void say(const char* text) {
  if (write(2, text, strlen(text)) < 0) return;
}
static void crashed(int number) {
  const char* name = number == SIGSEGV   ? "SIGSEGV"
                     : number == SIGBUS  ? "SIGBUS"
                     : number == SIGILL  ? "SIGILL"
                     : number == SIGFPE  ? "SIGFPE"
                                         : "SIGABRT";
  say("\nvirtual GPU: the program crashed in C ("), say(name), say("). The last CUDA call was ");
  say(last_call);
  for (int i = 0; i < MAX_UNWRITTEN && unwritten[i]; i++) say(i ? ", " : "; calls that have no effect here: "), say(unwritten[i]);
  say(".\nIf it does not crash on a GPU, report it with the command, the versions that `harness doctor` prints,\n"
      "and this text.\n");
  raise(number);  // SA_RESETHAND: now it ends the process
}

__attribute__((constructor)) static void watch(void) {
  static char stack[64 << 10];  // a stack for the handler: the main thread's own may be full
  sigaltstack(&(stack_t){.ss_sp = stack, .ss_size = sizeof stack}, NULL);
  const int numbers[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGABRT};
  for (unsigned i = 0; i < sizeof numbers / sizeof *numbers; i++) {
    struct sigaction before, ours = {.sa_handler = crashed, .sa_flags = SA_RESETHAND | SA_NODEFER | SA_ONSTACK};
    if (sigaction(numbers[i], NULL, &before) == 0 && before.sa_handler == SIG_DFL) sigaction(numbers[i], &ours, NULL);
  }
}
